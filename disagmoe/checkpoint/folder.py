"""A folder of checkpoints on disk: names, manifests, what is whole. Nothing here imports torch.

A checkpoint is written under a name of its own (`.saving-...`), every file is flushed to disk, the manifest (size and
SHA-256 of every file) comes last, and one rename makes it `step-00000040`. So a folder of that name is complete, or
has been damaged since. What is removed is renamed first, so that half a removal never looks like a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Of everything in a checkpoint; a reader refuses other numbers."""
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP = re.compile(r"step-(\d{8,})")
_SAVING = re.compile(r"\.saving-step-(\d{8,})-\w+")
_SUPERSEDED = re.compile(r"step-(\d{8,})\.superseded-\d+")
_CHUNK_BYTES = 1 << 22


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, found or read; the text names it, and the file where there is one."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint, or what is left of one."""

    step: int
    path: Path
    state: str
    """`complete`, `damaged`, `unfinished` (its run ended while it was being written) or `superseded` (a later run went
    back to an earlier step)."""
    problems: tuple[str, ...] = ()
    """What is wrong with a damaged one, by file."""


def step_name(step: int) -> str:
    """
    >>> step_name(40)
    'step-00000040'
    """
    return f"step-{step:08d}"


def temporary_name(step: int, run: str) -> str:
    """Where the run of that id writes a checkpoint before it is whole.

    >>> temporary_name(40, "ab12")
    '.saving-step-00000040-ab12'
    """
    return f".saving-{step_name(step)}-{run}"


def find_checkpoints(folder: Path) -> list[Found]:
    """Everything in `folder` that is or was to be a checkpoint, newest step first. Content is not read: see
    `file_problems`.

    Raises:
        CheckpointError: the folder can't be listed.
    """
    try:
        paths = sorted(folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be listed ({error})") from error
    found = []
    for path in paths:
        if match := _STEP.fullmatch(path.name):
            problems = tuple(shape_problems(path))
            found.append(
                Found(step=int(match[1]), path=path, state="damaged" if problems else "complete", problems=problems)
            )
        elif match := _SAVING.fullmatch(path.name):
            found.append(Found(step=int(match[1]), path=path, state="unfinished"))
        elif match := _SUPERSEDED.fullmatch(path.name):
            found.append(Found(step=int(match[1]), path=path, state="superseded"))
    return sorted(found, key=lambda entry: entry.step, reverse=True)


def write_manifest(path: Path, step: int, files: Mapping[str, tuple[int, str]]) -> None:
    """Write the manifest of a checkpoint, flushed to disk.

    Args:
        path: the checkpoint.
        files: bytes and SHA-256 by name.
    """
    entries = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(files.items())}
    text = json.dumps({"format": FORMAT, "step": step, "files": entries}, indent=1)
    write_durably(path / MANIFEST, f"{text}\nsha256 {hashlib.sha256(text.encode()).hexdigest()}\n".encode())


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`; it vouches for itself, too.

    Raises:
        CheckpointError: there is none, it is damaged, or of another format.
    """
    file = path / MANIFEST
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: can't be read ({error.strerror})") from error
    body, _, last = data.removesuffix(b"\n").rpartition(b"\n")
    if not data.endswith(b"\n") or last != b"sha256 " + hashlib.sha256(body).hexdigest().encode():
        raise CheckpointError(f"{file}: damaged (its own checksum differs)")
    content: dict[str, Any] = json.loads(body)
    if content["format"] != FORMAT:
        raise CheckpointError(f"{file}: format {content['format']}, but this version reads format {FORMAT}")
    return content


def shape_problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint as far as names and sizes tell."""
    try:
        files = read_manifest(path)["files"]
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name, entry in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            problems.append(f"{path / name}: {'missing' if isinstance(error, FileNotFoundError) else error.strerror}")
            continue
        if size != entry["bytes"]:
            problems.append(f"{path / name}: has {size} bytes, but was written with {entry['bytes']}")
    return problems


def file_problems(path: Path, names: Iterable[str] | None = None) -> list[str]:
    """Read files of a checkpoint (default: all) and compare their checksums.

    Returns: what differs, a line a file. A manifest that can't be read is a problem by itself.
    """
    try:
        files = read_manifest(path)["files"]
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name in files if names is None else names:
        try:
            size, digest = digest_of(path / name)
        except OSError as error:
            problems.append(f"{path / name}: can't be read ({error.strerror})")
            continue
        if (size, digest) != (files[name]["bytes"], files[name]["sha256"]):
            problems.append(f"{path / name}: damaged (its checksum differs from the one it was written with)")
    return problems


def digest_of(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
            size += len(data)
    return size, digest.hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint says of its run: step, position in the data, configuration, layout.

    Raises:
        CheckpointError: it can't be read or is damaged.
    """
    problems = file_problems(path, [STATE])
    if problems:
        raise CheckpointError(problems[0])
    content: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return content


def write_durably(path: Path, data: bytes) -> tuple[int, str]:
    """Write a file and wait until it is on disk; returns its bytes and SHA-256."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data), hashlib.sha256(data).hexdigest()


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk; file systems that can't do that are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def commit(temporary: Path, step: int) -> Path:
    """Give a whole checkpoint its name. From here on it exists.

    Raises:
        CheckpointError: there is one of that step already.
    """
    path = temporary.with_name(step_name(step))
    if path.exists():
        raise CheckpointError(f"{path}: there is a checkpoint of that step already")
    sync_folder(temporary)
    os.rename(temporary, path)
    sync_folder(path.parent)
    return path


def remove(path: Path) -> None:
    """Remove a checkpoint or what is left of one; a kill on the way leaves nothing that looks whole."""
    doomed = path.with_name(f".removing-{path.name.lstrip('.')}-{uuid.uuid4().hex[:8]}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def tidy(folder: Path, keep: int, *, run: str) -> None:
    """Remove what unfinished saves of other runs have left, and complete checkpoints beyond the newest `keep`.

    0 keeps all. Only complete checkpoints count: damaged and superseded ones stay, for a person to look at.
    """
    for path in folder.glob(".removing-*"):
        shutil.rmtree(path, ignore_errors=True)
    found = find_checkpoints(folder)
    complete = [entry for entry in found if entry.state == "complete"]
    doomed = [entry for entry in found if entry.state == "unfinished" and not entry.path.name.endswith(run)]
    for entry in [*doomed, *(complete[keep:] if keep else [])]:
        remove(entry.path)


def supersede(path: Path) -> Path:
    """Set a checkpoint aside: kept, but nothing continues from it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.superseded-{number}")).exists():
        number += 1
    os.rename(path, aside)
    return aside
