"""Every kind of `[data] source`, on small files made here, and the errors for those that do not fit."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from disagmoe.config.schema import DataConfig
from disagmoe.data import SampleSource, build_dataset
from disagmoe.data.build import is_hugging_face_name
from disagmoe.data.documents import stdlib_documents, synthetic_documents

END = 256


def build(source: Path | str, *, seq_len: int = 8, seed: int = 0, **fields: Any) -> SampleSource:
    fields.setdefault("shuffle", False)
    return build_dataset(DataConfig(source=str(source), **fields), seq_len=seq_len, seed=seed)


def epoch_of(source: SampleSource) -> list[int]:
    """The first epoch's tokens of an unshuffled source."""
    assert source.num_tokens_per_epoch is not None
    num_samples = -(-source.num_tokens_per_epoch // source.seq_len)
    return source.batch(range(num_samples)).tokens_BL.flatten().tolist()[: source.num_tokens_per_epoch]


def packed(*texts: str) -> list[int]:
    return [token for text in texts for token in [*text.encode(), END]]


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def write_tokenizer(folder: Path, *, config: dict[str, str] | None) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<unk>": 0, "one": 1, "two": 2, "three": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>", "<begin>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        entries = {str(i): {"content": token} for i, token in ((4, "<end>"), (5, "<begin>"))}
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": entries}))
    return folder


def test_text_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("zwei")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.jsonl").write_text('{"text": "eins"}\n\n{"text": null, "n": 2}\n{"text": "drei ü"}\n')
    (tmp_path / "README.md").write_text("not data")
    write_parquet(tmp_path / "d.parquet", text=["vier", None, "fünf"], n=[1, 2, 3])
    assert epoch_of(build(tmp_path)) == packed("eins", "drei ü", "zwei", "vier", "fünf")
    assert epoch_of(build(tmp_path / "b.txt")) == packed("zwei")


def test_text_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "eins", "text": 3}\n')
    assert epoch_of(build(tmp_path / "a.jsonl", text_field="body")) == packed("eins")
    parquet = write_parquet(tmp_path / "b.parquet", body=["zwei"], text=[3])
    assert epoch_of(build(parquet, text_field="body")) == packed("zwei")


def test_standard_library() -> None:
    started = time.perf_counter()
    source = build("python-stdlib", seq_len=128, shuffle=True)
    source.batch(range(16))
    assert time.perf_counter() - started < 2  # measured: 0.1 s
    assert source.vocab_size == 257
    assert source.num_tokens_per_epoch is not None and source.num_tokens_per_epoch > 3_000_000
    paths = [document.where for document in stdlib_documents()]
    assert str(Path(sysconfig.get_path("stdlib"), "dataclasses.py")) in paths
    assert not any("site-packages" in path or "/test/" in path for path in paths)
    assert source.fingerprint == build("python-stdlib", seq_len=128, shuffle=True).fingerprint


def test_synthetic_is_seeded_and_learnable() -> None:
    assert build("synthetic", seed=3).fingerprint == build("synthetic", seed=3).fingerprint
    first, other = (build("synthetic", seed=seed).sample(0).tokens_L.tolist() for seed in (3, 4))
    assert first != other
    assert build("synthetic").num_tokens_per_epoch in range(900_000, 1_200_000)
    documents = [document.text for document in synthetic_documents(0, num_documents=400)]
    assert len({len(text) for text in documents}) > 100
    # A counting document goes on by its own step, but for the noise.
    counting = documents[1]
    steps = [(after - before) % 64 for before, after in pairwise(counting)]
    assert max(steps.count(step) for step in set(steps)) > 0.7 * len(steps)
    # In the others two letters tell the next one, by a table that all of them share.
    seen: dict[bytes, list[int]] = {}
    for text in documents[::2]:
        for i in range(len(text) - 2):
            seen.setdefault(text[i : i + 2], []).append(text[i + 2])
    often = [following for following in seen.values() if len(following) >= 10]
    assert len(often) > 50
    agreeing = sum(max(following.count(letter) for letter in set(following)) for following in often)
    assert agreeing > 0.8 * sum(map(len, often))


def test_tokenizer_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n{"text": "three four one"}\n')
    folder = write_tokenizer(tmp_path / "tok", config={"eos_token": "<end>", "bos_token": "<begin>"})
    source = build(tmp_path / "a.jsonl", tokenizer=str(folder))
    assert source.vocab_size == 6
    assert epoch_of(source) == [5, 1, 2, 4, 5, 3, 0, 1, 4]
    labels = source.sample(0).labels_L.tolist()
    assert labels == [1, 2, 4, -100, 3, 0, 1, 4]


@pytest.fixture
def known_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset under torchtitan's registry, streamed by `datasets` from a local file."""
    datasets = pytest.importorskip("datasets")
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    file = tmp_path / "stream.jsonl"
    file.write_text("".join(json.dumps({"body": f"text {i}"}) + "\n" for i in range(5)))

    def load(path: str) -> Any:
        return datasets.load_dataset("json", data_files=path, split="train", streaming=True)

    entry = DatasetConfig(path=str(file), loader=load, sample_processor=lambda record: record["body"])
    monkeypatch.setitem(DATASETS, "made_here", entry)
    return "made_here"


def test_known_dataset_is_streamed_over_epochs(known_dataset: str) -> None:
    source = build(known_dataset)
    assert source.num_tokens_per_epoch is None
    expected = packed(*(f"text {i}" for i in range(5))) * 3
    assert source.batch(range(12)).tokens_BL.flatten().tolist() == expected[:96]
    assert source.sample(5).tokens_L.tolist() == expected[40:48]


def test_any_dataset_by_name_subset_split_and_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls: list[tuple[Any, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, subset, split, streaming))
        return datasets.Dataset.from_dict({"body": ["eins", None, "zwei"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = build("owner/books:en", split="validation", text_field="body", seq_len=9)
    assert source.sample(0).tokens_L.tolist() == packed("eins", "zwei")[:9]
    assert calls == [("owner/books", "en", "validation", True)]
    with pytest.raises(ValueError, match=r'"owner/books": \[data\] text_field = "text" .* the record has \[\'body\'\]'):
        build("owner/books").sample(0)


def test_dataset_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("no such dataset on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r'source = "owner/gone", split = "train": .*no such dataset'):
        build("owner/gone")
    # Misspelt: refused without asking anyone.
    with pytest.raises(ValueError, match=r'source = "python_stdlib": must be .*did you mean "python-stdlib"'):
        build("python_stdlib")


def test_what_is_a_name_and_what_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for name in ("c4", "allenai/c4", "allenai/c4:en", "other"):
        assert is_hugging_face_name(name)
    for path in ("corpus", "synthetic", "./c4", "/data/c4", "~/c4", "c4.txt", "data/c4.jsonl", "a/b/c", "data/", "a b"):
        assert not is_hugging_face_name(path)


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "gone.txt", r'source = ".*gone.txt": no such file or folder.*relative to'),
        ({"a.csv": "x"}, "a.csv", r'unknown suffix ".csv"; must be one of .txt, .jsonl, .parquet'),
        ({"a.csv": "x", "b.md": "y"}, ".", r"must hold .txt, .jsonl, .parquet files, but it holds .csv, .md"),
        ({"a.txt": ""}, "a.txt", r"a.txt is empty; a data file must hold text"),
        ({"a.jsonl": '{"text": ""}\n'}, "a.jsonl", r"every document in it is empty"),
        ({"a.jsonl": '{"body": "x", "id": 1}\n'}, "a.jsonl", r"line 1: .*text_field = \"text\".*has \['body', 'id'\]"),
        ({"a.jsonl": '{"text": "x"}\n{"text": 5}\n'}, "a.jsonl", r"line 2: .*must hold a string, but it holds a int"),
        ({"a.jsonl": '{"text": "x"}\n{"text": \n'}, "a.jsonl", r"line 2: must be one JSON object a line"),
        ({"a.jsonl": '["x"]\n'}, "a.jsonl", r"line 1: a record must be a JSON object.*a list"),
        ({"a.parquet": "x"}, "a.parquet", r"a.parquet: must be a Parquet file"),
    ],
)
def test_bad_local_sources(tmp_path: Path, files: dict[str, str], source: str, message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        build(tmp_path / source)


def test_bad_parquet_fields(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", body=["x"], n=[1])
    with pytest.raises(ValueError, match=r"a.parquet: .*text_field = \"text\".* has \['body', 'n'\]"):
        build(path)
    with pytest.raises(ValueError, match=r"text_field = \"n\" must hold a string, but it holds int64"):
        build(path, text_field="n")


def test_bad_tokenizers_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r'tokenizer = ".*gone": no such folder'):
        build(tmp_path / "a.txt", tokenizer=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"the folder must hold a tokenizer.json, but it holds \[\]"):
        build(tmp_path / "a.txt", tokenizer=str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="must have an end-of-sequence token"):
        build(tmp_path / "a.txt", tokenizer=str(write_tokenizer(tmp_path / "no_end", config=None)))
    with pytest.raises(ValueError, match=r"a.txt: text must be UTF-8 .* at byte 3"):
        build(tmp_path / "a.txt", tokenizer=str(write_tokenizer(tmp_path / "tok", config={"eos_token": "<end>"})))
    assert epoch_of(build(tmp_path / "a.txt")) == [*b"caf\xe9", END]
    with pytest.raises(ValueError, match=r"seq_len = 0: must be at least 1"):
        build("synthetic", seq_len=0)
    with pytest.raises(ValueError, match=r"seed = -1: must be at least 0"):
        build("synthetic", seed=-1)


def test_import_stays_light() -> None:
    code = (
        "import sys\n"
        "from disagmoe.config.schema import DataConfig\n"
        "from disagmoe.data import build_dataset\n"
        "build_dataset(DataConfig(), seq_len=8, seed=0).sample(0)\n"
        "print([m for m in ('torchtitan', 'datasets', 'pyarrow', 'tokenizers') if m in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
