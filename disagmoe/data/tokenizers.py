"""Text to token ids: bytes as they are, or a `tokenizer.json` through torchtitan's wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Tokenizer(Protocol):
    """What the packing needs to know. Documents are UTF-8 (or, for the byte tokenizer, any) bytes."""

    vocab_size: int
    end_id: int
    """Follows the last token of every document."""
    dtype: np.dtype[Any]
    """Smallest unsigned type that holds the ids `encode` gives."""

    def encode(self, text: bytes, *, where: str) -> npt.NDArray[Any]:
        """Token ids [n] of one document, without `end_id`. `where` names the document in errors."""
        ...


class ByteTokenizer:
    """Ids 0-255 are the bytes, 256 ends a document. Needs no files and no knowledge of the encoding."""

    vocab_size = 257
    end_id = 256
    dtype = np.dtype(np.uint8)

    def encode(self, text: bytes, *, where: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text, dtype=np.uint8)


class FolderTokenizer:
    """A Hugging Face tokenizer from a local folder, by torchtitan's `HuggingFaceTokenizer`.

    The end of a document is the tokenizer's end-of-sequence token; a begin-of-sequence token is put first where
    the tokenizer has one.
    """

    def __init__(self, folder: Path) -> None:
        field = f'[data] tokenizer = "{folder}"'
        if not folder.is_dir():
            raise ValueError(f'{field}: no such folder; give a folder with a tokenizer.json, or "bytes"')
        if not (folder / "tokenizer.json").is_file():
            names = sorted(p.name for p in folder.iterdir())
            raise ValueError(
                f"{field}: the folder must hold a tokenizer.json, but it holds {names[:10]}; "
                f'copy the file from the model\'s repository, or set tokenizer = "bytes"'
            )
        # Imported here: it costs a second, and the byte tokenizer does without.
        from torchtitan.components.tokenizer import HuggingFaceTokenizer

        self._tokenizer = HuggingFaceTokenizer(tokenizer_path=str(folder))
        end_id = self._tokenizer.eos_id
        if end_id is None:
            raise ValueError(
                f"{field}: the tokenizer must have an end-of-sequence token to end documents with; "
                f'add a tokenizer_config.json with "eos_token" to the folder'
            )
        largest_id = max(self._tokenizer.tokenizer.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(self._tokenizer.get_vocab_size(), largest_id + 1)
        self.end_id = int(end_id)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode(self, text: bytes, *, where: str) -> npt.NDArray[Any]:
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where}: text must be UTF-8 ({error.reason} at byte {error.start}); convert it, or set "
                f'[data] tokenizer = "bytes"'
            ) from error
        ids = self._tokenizer.encode(decoded, add_bos=True, add_eos=False)
        if ids and ids[-1] == self.end_id:  # some tokenizers add it unasked
            ids = ids[:-1]
        return np.asarray(ids, dtype=self.dtype)


def build_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or a folder with a `tokenizer.json` (`[data] tokenizer`)."""
    return ByteTokenizer() if name == "bytes" else FolderTokenizer(Path(name).expanduser())
