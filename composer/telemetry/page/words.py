"""How numbers and long texts are written on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from composer.records import GraphInput

_AGES = 1e12
"""Seconds that nothing takes."""


def sane(seconds: float) -> float:
    """Seconds to add up and draw: what is negative, no number or no such time counts as none."""
    return seconds if 0 < seconds < _AGES else 0.0


def duration(seconds: float) -> str:
    """Three digits at most, in the unit that fits: ``"412 ms"``, ``"12.3 s"``, ``"2 min 05 s"``."""
    seconds = sane(seconds)
    if not seconds:
        return "0 s"
    if seconds < 0.9995:
        milliseconds = seconds * 1000
        return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.2g} ms"
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def clock(seconds: float) -> str:
    """A round number of seconds in full: ``"0.05 s"``, ``"2 s"``, ``"3 min"``, ``"1 h 20 min"``."""
    if seconds < 60:
        return f"{seconds:.6g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = (hours, "h"), (minutes, "min"), (rest, "s")
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def counted(number: int, noun: str) -> str:
    """``"1 graph"``, ``"1,200 graphs"``, ``"2 processes"``."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def percentages(parts: Sequence[float]) -> list[float]:
    """Each part of the whole in per cent, to a tenth, so rounded that they add up to 100.

    All are 0 where the parts add up to nothing.
    """
    whole = sum(parts)
    if whole <= 0:
        return [0.0] * len(parts)
    exact = [part * 1000 / whole for part in parts]
    tenths = [math.floor(each) for each in exact]
    by_rest = sorted(range(len(parts)), key=lambda i: tenths[i] - exact[i])
    for i in by_rest[: 1000 - sum(tenths)]:
        tenths[i] += 1
    return [each / 10 for each in tenths]


def cut(name: str, limit: int) -> str:
    """A name, or its beginning and an ellipsis."""
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def head(text: str, limit: int) -> str:
    """The beginning of a long text, with a note of how much is left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters are in the record"


def tail(text: str, limit: int) -> str:
    """The end of a long text, from a whole line on, with a note of how much is left out."""
    if len(text) <= limit:
        return text
    kept = text[-limit:]
    kept = kept.partition("\n")[2] or kept
    return f"… {len(text) - len(kept):,} earlier characters are in the record\n{kept}"


def short(model: str) -> str:
    """The last part of a qualified name."""
    return model.rpartition(".")[2] or model


def moment(seconds: float) -> str:
    """A POSIX time as ``"2026-03-01 12:00:05 UTC"``; ``"-"`` for one that no calendar has."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "-"


def said(each: GraphInput) -> str:
    """An input as code: ``"float32[8, 224, s0] on cuda:0"``, or what else it is."""
    if each.kind != "tensor":
        return each.kind
    return f"{each.dtype}[{', '.join(map(str, each.shape))}] on {each.device}"
