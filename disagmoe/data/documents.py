"""Where local documents come from: files, the standard library's source text, or a seeded generator."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIXES = (".txt", ".jsonl", ".parquet")
"""File types that `[data] source` reads."""


class Document(NamedTuple):
    text: bytes
    where: str
    """For error messages: the file, with the record's number where a file holds several."""


_STDLIB_SKIPPED = frozenset(
    # Third-party packages and tests, then two folders of generated tables.
    ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)


def stdlib_documents() -> Iterator[Document]:
    """The Python files of this machine's standard library, one document a file, about 13 MB.

    Text differs between Python versions: compare `SampleSource.fingerprint` over the workers of a run.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    if not paths:
        raise ValueError(
            f'[data] source = "python-stdlib": the standard library must be present as .py files, but {root} has '
            f'none; set source to a folder of .txt files, or to "synthetic"'
        )
    for path in sorted(paths):
        text = Path(path).read_bytes()
        # A few files are in other encodings; a tokenizer that wants text must still be able to read them.
        yield Document(text if text.isascii() else text.decode("utf-8", "replace").encode(), path)


def local_documents(path: Path, *, text_field: str) -> Iterator[Document]:
    """Documents of a file, or of all files of a known type below a folder, in the order of their names.

    A .txt file is one document; a record of a .jsonl or .parquet file is one, its text in `text_field`. Records
    without text (null or empty) are left out.

    Raises:
        ValueError: no such path, no readable file, a suffix or record that does not fit, no `text_field`.
    """
    for file in _files(path):
        if file.suffix == ".txt":
            yield Document(file.read_bytes(), str(file))
        elif file.suffix == ".jsonl":
            yield from _jsonl_documents(file, text_field)
        else:
            yield from _parquet_documents(file, text_field)


def _files(path: Path) -> list[Path]:
    field = f'[data] source = "{path}"'
    known = ", ".join(SUFFIXES)
    if path.is_dir():
        everything = sorted(p for p in path.rglob("*") if p.is_file())
        files = [p for p in everything if p.suffix in SUFFIXES]
        if not files:
            found = sorted({p.suffix or p.name for p in everything})
            raise ValueError(
                f"{field}: the folder must hold {known} files, but it holds "
                f"{', '.join(found[:10]) or 'nothing'}; convert the text to one of these types"
            )
    elif path.is_file():
        files = [path]
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f'{field}: unknown suffix "{path.suffix}"; must be one of {known}; rename or convert the file'
            )
    else:
        raise ValueError(f"{field}: no such file or folder (paths are relative to {Path.cwd()}); correct it")
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(f"{field}: {file} is empty; a data file must hold text; remove it or fill it")
    return files


def missing_field_error(where: str, text_field: str, names: list[str]) -> ValueError:
    """The error for a record without its text, shared by all record formats."""
    return ValueError(
        f'{where}: [data] text_field = "{text_field}" must name a field of every record, but the record has '
        f"{names}; set text_field to the one that holds the text"
    )


def not_text_error(where: str, text_field: str, found: str) -> ValueError:
    return ValueError(
        f'{where}: [data] text_field = "{text_field}" must hold a string, but it holds {found}; '
        f"set text_field to the field with the text, or convert the data"
    )


def record_text(record: object, *, text_field: str, where: str) -> bytes:
    """The text of a record as UTF-8; empty for null."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a record must be a JSON object with named fields, but it is a {_type(record)}")
    if text_field not in record:
        raise missing_field_error(where, text_field, sorted(map(str, record)))
    text = record[text_field]
    if text is not None and not isinstance(text, str):
        raise not_text_error(where, text_field, f"a {_type(text)}")
    # Lone surrogates are legal in JSON strings but not in UTF-8.
    return (text or "").encode("utf-8", "replace")


def _type(value: object) -> str:
    return type(value).__name__


def _jsonl_documents(file: Path, text_field: str) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: must be one JSON object a line: {error}; correct the line") from error
            yield Document(record_text(record, text_field=text_field, where=where), where)


def _parquet_documents(file: Path, text_field: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file}: must be a Parquet file: {error}; write it again") from error
    with parquet:
        schema = parquet.schema_arrow
        if text_field not in schema.names:
            raise missing_field_error(str(file), text_field, schema.names)
        kind = schema.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise not_text_error(str(file), text_field, str(kind))
        number = 0
        for batch in parquet.iter_batches(columns=[text_field]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield Document((text or "").encode("utf-8", "replace"), f"{file}, row {number}")


_ALPHABET = 64
_FIRST_LETTER = ord("0")
"""Printable ASCII from "0" on, so that every tokenizer can read it."""


def synthetic_documents(
    seed: int, *, num_documents: int = 4096, max_length: int = 480, noise: float = 0.1
) -> Iterator[Document]:
    """Text that a small model learns quickly, about one million letters of an alphabet of 64.

    Even documents are a noisy second-order chain: a letter follows from the two before it by one fixed random table
    (to be remembered by the weights). Odd ones count upwards by a step of their own (to be read off the context, by
    attention). A share `noise` of the letters is drawn at random instead.
    """
    # Raw generator output: guaranteed to be the same for all numpy versions.
    generator = np.random.PCG64(np.random.SeedSequence((seed, 2)))
    table = (generator.random_raw(_ALPHABET**2) % _ALPHABET).astype(np.uint8).reshape(_ALPHABET, _ALPHABET)
    lengths = max_length // 15 + generator.random_raw(num_documents) % (max_length - max_length // 15 + 1)
    steps = (1 + generator.random_raw(num_documents) % (_ALPHABET - 1)).astype(np.uint8)
    counts = np.arange(num_documents) % 2 == 1
    letters = np.empty((max_length, num_documents), dtype=np.uint8)
    for place in range(max_length):
        raw = generator.random_raw(num_documents)
        drawn = (raw % _ALPHABET).astype(np.uint8)
        if place < 2:
            letters[place] = drawn
            continue
        before, last = letters[place - 2], letters[place - 1]
        regular = np.where(counts, (last + steps) % _ALPHABET, table[before, last])
        letters[place] = np.where((raw >> 32) < np.uint64(noise * 2**32), drawn, regular)
    text = (letters + _FIRST_LETTER).T.copy()
    for number in range(num_documents):
        yield Document(text[number, : int(lengths[number])].tobytes(), f"synthetic document {number}")
