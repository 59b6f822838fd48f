"""Units and pieces as torch.distributed.checkpoint (DCP) sees them, and the writer that makes a checkpoint whole.

DCP plans, writes, gathers and reads; what differs here: who writes what is decided before (`state.assign`), files are
hashed while they are written, and the coordinator's last act is the commit.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from disagmoe.checkpoint.folder import (
    STATE,
    CheckpointError,
    commit,
    digest_of,
    write_durably,
    write_manifest,
)
from disagmoe.checkpoint.state import Piece, Unit

_METADATA = ".metadata"
# DCP remarks that it works in a single process, which is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class _SavePlanner(SavePlanner):
    """Writes exactly the units that it is given."""

    def __init__(self, units: Sequence[Unit], tensors: Sequence[Tensor]) -> None:
        self._tensors = {_index(u): t for u, t in zip(units, tensors, strict=True)}
        self._units = units

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = []
        for unit in self._units:
            index = _index(unit)
            chunk = ChunkStorageMetadata(offsets=cast(torch.Size, index.offset), sizes=torch.Size(unit.shape))
            properties = TensorProperties.create_from_tensor(self._tensors[index])
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(unit.full_shape))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._tensors[write_item.index]  # its hint does not count in comparisons


def _index(unit: Unit) -> MetadataIndex:
    return MetadataIndex(unit.key, torch.Size([unit.start, *(0 for _ in unit.shape[1:])] if unit.shape else []))


@dataclass(frozen=True)
class _FileResult(WriteResult):
    """A write result that also says what became of its file."""

    file: tuple[str, int, str] = ("", 0, "")
    """Name, bytes, SHA-256."""


class _HashingStream(io.RawIOBase):
    """Passes on to a file what it is given and keeps its hash; remembers the system's own error, which torch hides."""

    def __init__(self, raw: io.BufferedWriter) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self._raw.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        try:
            self._raw.flush()
        except OSError as error:
            self.error = self.error or error
            raise

    def tell(self) -> int:
        return self._raw.tell()

    def fileno(self) -> int:
        return self._raw.fileno()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        pass  # whoever opened the file closes it


class _HashingFiles(FileSystem):
    """DCP's file access, with a hash of what is written."""

    def __init__(self) -> None:
        self.streams: dict[str, _HashingStream] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with Path(path).open(mode) as raw:
            stream = self.streams[Path(path).name] = _HashingStream(cast(io.BufferedWriter, raw))
            yield stream


class CommittingWriter(FileSystemWriter):
    """DCP's writer into a temporary folder; on the coordinator, `finish` makes the checkpoint.

    Args:
        temporary: folder to write into, beside the final one.
        step: of the checkpoint.
        state: what goes into `state.json`.
    """

    def __init__(self, temporary: Path, step: int, state: Mapping[str, Any]) -> None:
        super().__init__(temporary)
        self.fs = self._files = _HashingFiles()
        self._temporary, self._step, self._state = temporary, step, state

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        try:
            results = super().write_data(plan, planner).wait()
        except Exception:
            errors = [stream.error for stream in self._files.streams.values() if stream.error is not None]
            if errors:
                raise OSError(errors[0].errno, errors[0].strerror, str(self._temporary)) from None
            raise
        marked: list[WriteResult] = []
        for result in results:
            name = result.storage_data.relative_path
            stream = self._files.streams[name]
            size = (self._temporary / name).stat().st_size
            file = (name, size, stream.digest.hexdigest())
            marked.append(_FileResult(result.index, result.size_in_bytes, result.storage_data, file))
        done.set_result(marked)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, tuple[int, str]] = {}
        for rank, of_rank in enumerate(results):
            for result in of_rank:
                assert isinstance(result, _FileResult)
                name, size, digest = result.file
                files[name] = (size, digest)
                if not (self._temporary / name).is_file():
                    raise CheckpointError(
                        f"{self._temporary / name}: written by rank {rank}, but not to be seen by rank 0; [checkpoint] "
                        f"folder must be on a file system that all nodes share"
                    )
        plain = [[WriteResult(r.index, r.size_in_bytes, r.storage_data) for r in of_rank] for of_rank in results]
        super().finish(metadata, plain)
        files[_METADATA] = digest_of(self._temporary / _METADATA)
        text = json.dumps(self._state, indent=1)
        files[STATE] = write_durably(self._temporary / STATE, text.encode())
        write_manifest(self._temporary, self._step, files)
        commit(self._temporary, self._step)


def write(
    writer: CommittingWriter,
    units: Sequence[Unit],
    tensors: Sequence[Tensor],
    *,
    group: dist.ProcessGroup | None,
) -> None:
    """Write a checkpoint. Collective over `group`; None: this process alone.

    Raises:
        CheckpointError: it could not be written, on every process alike; nothing of it counts.
    """
    try:
        dcp_save(
            {},
            storage_writer=writer,
            planner=_SavePlanner(units, tensors),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"on rank {rank}: {_words(cause)}") from cause


def _words(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return f"{type(error).__name__}: {error}"


class _LoadPlanner(LoadPlanner):
    """Reads into exactly the pieces that it is given, each from whatever units hold its rows."""

    def __init__(self, pieces: Sequence[Piece], full_shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._full_shapes = full_shapes
        self._pieces: dict[str, dict[tuple[int, ...], Tensor]] = {}
        for piece in pieces:
            offset = (piece.start, *(0 for _ in piece.tensor.shape[1:])) if piece.tensor.dim() else ()
            self._pieces.setdefault(piece.key, {})[offset] = piece.tensor
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for key, places in self._pieces.items():
            stored = self._metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"has no tensor {key}")
            if tuple(stored.size) != tuple(self._full_shapes[key]):
                raise CheckpointError(f"{key} is {tuple(stored.size)}, but the model's is {self._full_shapes[key]}")
            dtype = next(iter(places.values())).dtype
            if stored.properties.dtype != dtype:
                raise CheckpointError(f"{key} is {stored.properties.dtype}, but the model's is {dtype}")
            chunks = [
                ChunkStorageMetadata(offsets=torch.Size(offset), sizes=tensor.size())
                for offset, tensor in places.items()
            ]
            items += create_read_items_for_chunk_list(key, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        tensor = self._pieces[index.fqn][tuple(index.offset)]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def read(path: Path, pieces: Sequence[Piece], full_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fill `pieces` from the checkpoint at `path`, whose files must have been verified. Not collective.

    Args:
        full_shapes: Of the unsplit tensors, by key.

    Raises:
        CheckpointError: a tensor is missing or has another shape or dtype.
    """
    first: dict[tuple[str, int], Piece] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for piece in pieces:
        known = first.setdefault((piece.key, piece.start), piece)
        if known is not piece:
            copies.append((piece.tensor, known.tensor))
    try:
        reader = FileSystemReader(path)
        dcp_load({}, storage_reader=reader, planner=_LoadPlanner([*first.values()], full_shapes), no_dist=True)
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{path}: {_words(cause)}") from cause
    with torch.no_grad():
        for copy, original in copies:
            copy.copy_(original)


def stored_keys(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a checkpoint, whose metadata must have been verified: it is a pickle."""
    metadata = FileSystemReader(path).read_metadata()
    return {
        key: tuple(entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
