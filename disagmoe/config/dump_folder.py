"""The folder that a run writes into: claimed by one run at a time, never overwritten by another.

A folder that is missing or empty is used. One that holds anything belongs to an earlier run (or is not a run's at all)
and is refused, unless that run has a folder of checkpoints and this one continues it: then what is there is added to,
and an earlier `config.toml` is kept as `config.1.toml` and so on. A running run holds a lock on `.lock`, which the
system gives back when the process ends, however it ends; the file says who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from disagmoe.config.errors import ConfigError, Problem
from disagmoe.config.load import ResolvedConfig, write_resolved

LOCK_NAME = ".lock"
STATUS_NAME = ".status"
"""Where each process says what it is doing; others than the one that claims the folder may have made it first."""
CONFIG_NAME = "config.toml"
_KEY = "dump_folder"


def find_folder_problem(resolved: ResolvedConfig) -> Problem | None:
    """Why the run can't write into its dump folder; None when it can. Changes nothing on disk."""
    folder = Path(resolved.config.dump_folder)
    instead = f"to start another run, add --dump_folder={_free_name(folder)}"
    if not folder.exists():
        parent = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        if parent.is_dir() and os.access(parent, os.W_OK):
            return None
        return resolved.problem(_KEY, f"can't be made: {parent} must be a folder that you may write to")
    if not folder.is_dir():
        return resolved.problem(_KEY, "must be a folder, but is a file", fix=instead)
    if not os.access(folder, os.W_OK):
        return resolved.problem(_KEY, "must be a folder that you may write to")
    holder = _holder(folder / LOCK_NAME)
    if holder:
        return resolved.problem(_KEY, f"is being written by a run that is still going ({holder})", fix=instead)
    if not [p for p in folder.iterdir() if p.name not in (LOCK_NAME, STATUS_NAME)]:
        return None
    if _continues(resolved, folder):
        return None
    if (folder / CONFIG_NAME).exists():
        part = resolved.config.checkpoint
        saved = part.resume == "none" and (folder / part.folder).is_dir()
        go_on = "; to continue it, add --checkpoint.resume=auto" if part.enable and saved else ""
        fix = f"{instead}{go_on}; to do this one anew, remove it first: rm -r {folder}"
        return resolved.problem(_KEY, "holds an earlier run, which is never overwritten", fix=fix)
    return resolved.problem(_KEY, "holds files that are not a run's; a run wants a folder of its own", fix=instead)


def _continues(resolved: ResolvedConfig, folder: Path) -> bool:
    """Whether the folder is of a run that this one goes on with."""
    part = resolved.config.checkpoint
    return part.enable and part.resume != "none" and (folder / part.folder).is_dir() and (folder / CONFIG_NAME).exists()


def _keep_config(folder: Path) -> None:
    """Set an earlier run's resolved configuration aside."""
    if not (folder / CONFIG_NAME).exists():
        return
    stem, suffix = CONFIG_NAME.split(".")
    number = 1
    while (folder / f"{stem}.{number}.{suffix}").exists():
        number += 1
    os.rename(folder / CONFIG_NAME, folder / f"{stem}.{number}.{suffix}")


def _free_name(folder: Path) -> Path:
    """`folder_2`, `folder_3` ...: the first that does not exist."""
    number = 2
    while folder.with_name(f"{folder.name}_{number}").exists():
        number += 1
    return folder.with_name(f"{folder.name}_{number}")


@contextlib.contextmanager
def claim_dump_folder(resolved: ResolvedConfig) -> Iterator[Path]:
    """Hold the dump folder for as long as the context lasts and write the resolved configuration into it.

    For one process of a run, before any other writes. The folder is made when missing.

    Raises:
        ConfigError: the folder can't be used, or another run has just claimed it.
    """
    problem = find_folder_problem(resolved)
    if problem is not None:
        raise ConfigError([problem])
    folder = Path(resolved.config.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a+", encoding="utf-8") as file:
        if not _lock(file):
            rule = f"has just been claimed by another run ({_describe(folder / LOCK_NAME)})"
            raise ConfigError([resolved.problem(_KEY, rule, fix=f"add --dump_folder={_free_name(folder)}")])
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        _keep_config(folder)
        write_resolved(folder / CONFIG_NAME, resolved)
        try:
            yield folder
        finally:
            (folder / LOCK_NAME).unlink(missing_ok=True)


def _lock(file: TextIO) -> bool:
    """Take the lock without waiting; True also on file systems that have none, where the first check must do."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def _holder(path: Path) -> str:
    """Who holds the lock, in words; empty when nobody does."""
    try:
        with path.open("r+", encoding="utf-8") as file:
            return "" if _lock(file) else _describe(path)
    except OSError:
        return ""


def _describe(path: Path) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return f"process {content['pid']} on {content['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown process"
