"""A CPU quota a worker, by cgroups version 1 (`cpu.cfs_quota_us`) or 2 (`cpu.max`)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hierarchy:
    """Where the machine's CPU controller is mounted."""

    root: Path
    version: int


def find_hierarchy(mounts: str | None = None) -> Hierarchy:
    """The CPU controller of this machine.

    Args:
        mounts: text of /proc/mounts (for tests).

    Raises:
        RuntimeError: there is none.
    """
    for line in (mounts if mounts is not None else Path("/proc/mounts").read_text()).splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchy(Path(where), 1)
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                if "cpu" in Path(where, "cgroup.controllers").read_text().split():
                    return Hierarchy(Path(where), 2)
    raise RuntimeError("no CPU controller: neither cgroup v1 with cpu nor cgroup v2 with cpu is mounted")


def make(name: str, num_workers: int) -> None:
    """Make cgroup `name` with one below it for each worker, without a limit yet.

    Raises:
        RuntimeError: the machine does not allow it.
    """
    hierarchy = find_hierarchy()
    folder = hierarchy.root / name
    try:
        if hierarchy.version == 2:
            _delegate_cpu(hierarchy.root)
        folder.mkdir()
        if hierarchy.version == 2:
            _delegate_cpu(folder)
        for rank in range(num_workers):
            worker(name, rank).mkdir()
            if hierarchy.version == 1:
                _unlimited(worker(name, rank)).mkdir()
    except OSError as error:
        raise RuntimeError(f"cannot make cgroups below {hierarchy.root}: {error}") from error


def _delegate_cpu(folder: Path) -> None:
    control = folder / "cgroup.subtree_control"
    if "cpu" not in control.read_text().split():
        control.write_text("+cpu")


def worker(name: str, rank: int) -> Path:
    """Folder of a worker's cgroup."""
    return find_hierarchy().root / name / f"worker{rank}"


def join(folder: Path) -> None:
    """Put the calling process into a worker's cgroup; its children will be in it too."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def set_quota(folder: Path, quota_s: float, period_s: float) -> None:
    """Let a worker's processes run for `quota_s` CPU seconds every `period_s`; 0: as long as they like."""
    quota, period = str(round(quota_s * 1e6)) if quota_s else "", str(round(period_s * 1e6))
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota or 'max'} {period}")
        return
    (folder / "cpu.cfs_quota_us").write_text("-1")  # else a longer period may be refused for its share
    (folder / "cpu.cfs_period_us").write_text(period)
    if quota:
        (folder / "cpu.cfs_quota_us").write_text(quota)


def exempt_other_threads(folder: Path) -> None:
    """Leave the quota to the main threads of a worker's processes: those that move data run as they like.

    Does nothing with cgroups version 2, which limits whole processes.
    """
    if not _unlimited(folder).is_dir():
        return
    for pid in map(int, (folder / "cgroup.procs").read_text().split()):
        with contextlib.suppress(FileNotFoundError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                if int(thread.name) != pid:
                    with contextlib.suppress(OSError):  # it has ended
                        (_unlimited(folder) / "tasks").write_text(thread.name)


def _unlimited(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.unlimited")


def remove(name: str) -> None:
    """Kill what runs in cgroup `name` and remove it. Does nothing if it is gone."""
    top = find_hierarchy().root / name
    deadline = time.monotonic() + 10.0
    while top.exists():
        # Without a limit, or it would take them long to die.
        for folder in top.iterdir():
            if folder.is_dir():
                with contextlib.suppress(OSError):
                    set_quota(folder, 0.0, 0.01)
        for pid in _processes(top):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            for folder in [*(p for p in top.iterdir() if p.is_dir()), top]:
                folder.rmdir()
        if time.monotonic() > deadline and top.exists():
            raise RuntimeError(f"cgroup {top} can't be removed: processes {_processes(top)} don't end")
        time.sleep(0.005)


def _processes(top: Path) -> list[int]:
    found = []
    for file in top.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            found += [int(line) for line in file.read_text().split()]
    return found
