"""Calling `ip` and `tc`."""

from __future__ import annotations

import subprocess


def call(*words: str) -> str:
    """Run a command and return what it prints.

    Raises:
        RuntimeError: it failed; with its message.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
