"""What each worker is doing, in one line, readable by the others after its process has died."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

_SLOT_BYTES = 6000
_NUM_SLOTS = 2


class StatusBoard:
    """One small memory-mapped file a rank: writing costs microseconds, and what was written outlives the process.

    A file has two slots and a byte that says which one counts, so that a reader never sees half a line, not even that
    of a process that was killed while it wrote.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / f"rank_{rank}"
        size = 1 + _NUM_SLOTS * _SLOT_BYTES
        self._path.write_bytes(b"\0" * size)
        with self._path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._text = ""

    @property
    def text(self) -> str:
        """What this rank is doing, without details of a wait."""
        return self._text

    def write(self, text: str) -> None:
        """This rank now does `text`."""
        self._text = text
        self._write(text)

    def add(self, detail: str) -> None:
        """Show a detail behind the text, e.g. what is being waited for; empty: no more."""
        self._write(f"{self._text}, {detail}" if detail else self._text)

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")[: _SLOT_BYTES - 1] + b"\0"
        slot = 1 - self._map[0]
        start = 1 + slot * _SLOT_BYTES
        self._map[start : start + len(data)] = data
        self._map[0] = slot

    def read(self, rank: int) -> str:
        """The last status of `rank`; empty if its file is not visible from here."""
        try:
            data = (self._folder / f"rank_{rank}").read_bytes()
        except OSError:
            return ""
        if len(data) != 1 + _NUM_SLOTS * _SLOT_BYTES:
            return "starting"
        start = 1 + data[0] * _SLOT_BYTES
        return data[start : start + _SLOT_BYTES].split(b"\0", 1)[0].decode("utf-8", "ignore") or "starting"

    def remove(self) -> None:
        """End of a run that went well: remove this rank's file, and the folder with the last one."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
