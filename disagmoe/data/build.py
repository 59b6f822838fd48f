"""From `[data]` to a `SampleSource`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from disagmoe.config.schema import DataConfig
from disagmoe.data.documents import SUFFIXES, Document, local_documents, stdlib_documents, synthetic_documents
from disagmoe.data.packing import PackedSource, build_corpus
from disagmoe.data.sample import SampleSource
from disagmoe.data.tokenizers import build_tokenizer

BUILT_IN = ("python-stdlib", "synthetic")
_HUGGING_FACE_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def build_dataset(data_cfg: DataConfig, *, seq_len: int, seed: int) -> SampleSource:
    """Open `[data] source` and give its samples of `seq_len` tokens by global index.

    `python-stdlib`, `synthetic` and local paths are tokenised now and kept in memory (one byte a token with the byte
    tokenizer, two or four with others), with random access. A Hugging Face dataset is streamed: indices may only
    increase, apart from a window.

    Raises:
        ValueError: the source, tokenizer or text field does not exist or holds no text.
    """
    if seq_len < 1:
        raise ValueError(f"[training] seq_len = {seq_len}: must be at least 1 token")
    if seed < 0:
        raise ValueError(f"[debug] seed = {seed}: must be at least 0")
    if is_hugging_face_name(data_cfg.source):
        # Asking the Hub for a misspelt name takes half a minute without a network.
        if meant := difflib.get_close_matches(data_cfg.source, BUILT_IN, n=1, cutoff=0.8):
            raise ValueError(
                f'[data] source = "{data_cfg.source}": must be one of {", ".join(BUILT_IN)}, an existing path or a '
                f'Hugging Face dataset; did you mean "{meant[0]}"?'
            )
        from disagmoe.data.streaming import StreamedSource, hugging_face_documents

        return StreamedSource(
            lambda epoch: hugging_face_documents(
                data_cfg.source, split=data_cfg.split, text_field=data_cfg.text_field, epoch=epoch
            ),
            build_tokenizer(data_cfg.tokenizer),
            name=data_cfg.source,
            seq_len=seq_len,
        )
    documents = _local_documents(data_cfg, seed)
    tokenizer = build_tokenizer(data_cfg.tokenizer)
    return PackedSource(
        build_corpus(documents, tokenizer, source=data_cfg.source),
        seq_len=seq_len,
        vocab_size=tokenizer.vocab_size,
        seed=seed,
        shuffle=data_cfg.shuffle,
    )


def is_hugging_face_name(source: str) -> bool:
    """Whether `source` is neither built in nor a path: `name`, `owner/name`, either with `:subset`.

    Whatever exists on disk is a path, and so is whatever starts or ends like one, so that a misspelt path is
    reported as such and not looked up on the network.
    """
    if source in BUILT_IN or Path(source).expanduser().exists():
        return False
    looks_like_path = source.startswith(("/", ".", "~")) or source.endswith((*SUFFIXES, "/"))
    return not looks_like_path and _HUGGING_FACE_NAME.fullmatch(source) is not None


def _local_documents(data_cfg: DataConfig, seed: int) -> Iterator[Document]:
    if data_cfg.source == "python-stdlib":
        return stdlib_documents()
    if data_cfg.source == "synthetic":
        return synthetic_documents(seed)
    return local_documents(Path(data_cfg.source).expanduser(), text_field=data_cfg.text_field)
