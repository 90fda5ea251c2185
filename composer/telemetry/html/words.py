"""Formats numbers and long texts for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from composer.records import GraphInput

_AGES = 1e12
"""A limit in seconds; longer times are not valid."""


def sane(seconds: float) -> float:
    """Return the seconds, or 0 if they are negative, not a number, or impossibly long."""
    return seconds if 0 < seconds < _AGES else 0.0


def duration(seconds: float) -> str:
    """Return a time with a suitable unit: ``"412 ms"``, ``"12.3 s"``, ``"2 min 05 s"``."""
    seconds = sane(seconds)
    if not seconds:
        return "0 s"
    for below, factor, form, unit in _SHORT:
        if seconds < below:
            return f"{seconds * factor:{form}} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


_SHORT = (
    *((9.95e-3, 1000, ".2g", "ms"), (0.9995, 1000, ".0f", "ms")),
    *((9.995, 1, ".2f", "s"), (99.95, 1, ".1f", "s")),
)
"""For times below a number of seconds: the factor, the format and the unit."""


def clock(seconds: float) -> str:
    """Return a round number of seconds without rounding: ``"0.05 s"``, ``"1 h 20 min"``."""
    if seconds < 60:
        return f"{seconds:.6g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = (hours, "h"), (minutes, "min"), (rest, "s")
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def percentages(parts: Sequence[float]) -> list[float]:
    """Return each part in per cent of the sum, rounded to tenths so that they add up to 100.

    All are 0 if the sum is 0.
    """
    whole = sum(parts)
    if whole <= 0:
        return [0.0] * len(parts)
    exact = [part * 1000 / whole for part in parts]
    tenths = [math.floor(each) for each in exact]
    largest_rest_first = sorted(range(len(parts)), key=lambda i: tenths[i] - exact[i])
    for i in largest_rest_first[: 1000 - sum(tenths)]:
        tenths[i] += 1
    return [each / 10 for each in tenths]


def cut(name: str, limit: int) -> str:
    """Return a name, shortened with an ellipsis if it is longer than ``limit`` characters."""
    if len(name) <= limit:
        return name
    return f"{name[: limit - 1]}…"


def head(text: str, limit: int) -> str:
    """Return the beginning of a long text, with the number of characters that are left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters are in the record"


def tail(text: str, limit: int) -> str:
    """Return the last whole lines of a long text, with the number of characters left out."""
    if len(text) <= limit:
        return text
    kept = text[-limit:]
    kept = kept.partition("\n")[2] or kept
    return f"… {len(text) - len(kept):,} earlier characters are in the record\n{kept}"


def short(model: str) -> str:
    """Return the last part of a qualified name."""
    return model.rpartition(".")[2] or model


def moment(seconds: float) -> str:
    """Return a POSIX time as ``"2026-03-01 12:00:05 UTC"``; ``"-"`` if there is no such date."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "-"


def input_text(each: GraphInput) -> str:
    """Return an input as text: ``"float32[8, 224, s0] on cuda:0"``, or its kind if no tensor."""
    if each.kind != "tensor":
        return each.kind
    return f"{each.dtype}[{', '.join(map(str, each.shape))}] on {each.device}"
