"""The console's line of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from disagmoe.layout import Role
from disagmoe.observability import metrics as m
from disagmoe.observability.progress import format_duration

_RESET = "\x1b[0m"
_DIM = "\x1b[2m"
_COLOURS = {m.LOSS: "\x1b[32m", m.TOKENS_PER_S: "\x1b[36m", m.EXPOSED_COMM_S: "\x1b[33m"}


def console_line(values: Mapping[str, Any], *, num_steps: int, eta_s: float | None = None, colour: bool = False) -> str:
    """One step in fields of fixed width, those without a value left out.

    Exposed communication is a share of the step's time, mean over a role's workers.

    >>> console_line({"step": 7, "loss": 3.21, "tokens_per_s": 8123.4, "step_time_s": 0.25}, num_steps=100, eta_s=23.2)
    'step   7/100  loss  3.2100      8,123 tok/s   250 ms/step  ETA    0:23'
    """
    width = len(str(num_steps))
    fields = [(m.STEP, "step", f"{values[m.STEP]:>{width}}/{num_steps}")]
    if (loss := values.get(m.LOSS)) is not None:
        fields.append((m.LOSS, "loss", f"{loss:7.4f}"))
    if (grad_norm := values.get(m.GRAD_NORM)) is not None:
        fields.append((m.GRAD_NORM, "grad norm", f"{grad_norm:7.3f}"))
    if (tokens_per_s := values.get(m.TOKENS_PER_S)) is not None:
        fields.append((m.TOKENS_PER_S, "", f"{tokens_per_s:>9,.0f} tok/s"))
    step_time_s = values.get(m.STEP_TIME_S)
    if step_time_s is not None:
        fields.append((m.STEP_TIME_S, "", f"{_step_time(step_time_s)}/step"))
    if eta_s is not None:
        fields.append(("", "ETA", f"{format_duration(eta_s):>7}"))
    exposed = [
        f"{role.value} {100 * seconds / step_time_s:3.0f}%"
        for role in Role
        if step_time_s and (seconds := values.get(m.role_key(role, m.EXPOSED_COMM_S, "mean"))) is not None
    ]
    if exposed:
        fields.append((m.EXPOSED_COMM_S, "exposed comm", " ".join(exposed)))
    if (utilisation := values.get(m.MFU)) is not None:
        fields.append((m.MFU, "mfu", f"{100 * utilisation:4.1f}%"))
    return "  ".join(_field(key, label, text, colour) for key, label, text in fields)


def _field(key: str, label: str, text: str, colour: bool) -> str:
    if not colour:
        return f"{label} {text}" if label else text
    if key in _COLOURS:
        text = f"{_COLOURS[key]}{text}{_RESET}"
    return f"{_DIM}{label}{_RESET} {text}" if label else text


def _step_time(seconds: float) -> str:
    """Seven characters.

    >>> _step_time(0.25), _step_time(1.234), _step_time(99.96)
    (' 250 ms', ' 1.23 s', '100.0 s')
    """
    if not math.isfinite(seconds):
        return f"{seconds:5} s"
    if seconds < 0.9995:
        return f"{1000 * seconds:4.0f} ms"
    return f"{seconds:5.2f} s" if seconds < 9.995 else f"{seconds:5.1f} s"
