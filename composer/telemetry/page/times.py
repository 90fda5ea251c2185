"""The measured times of each graph's engines, beside eager's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from composer.records import EAGER, CompileReport
from composer.telemetry.page.words import sane

LONGEST = 2.0
"""Where bars end, in times of eager's: so eager's line is in the middle."""


@dataclass(frozen=True, slots=True)
class Time:
    """What one engine takes for a call.

    Attributes:
        engine: Its name, and its precision if that is not the graph's own.
        status: Of its attempt; the engine that serves has ``succeeded``.
        seconds: A call's.
        ratio: The same by eager's: below 1 it is faster than eager.
        percent: Width of its bar.
    """

    engine: str
    status: str
    seconds: float
    ratio: float
    percent: float


@dataclass(frozen=True, slots=True)
class Times:
    """The engines of one graph in the order they were tried; ``eager`` in seconds a call."""

    eager: float
    engines: tuple[Time, ...]


def times(graph: CompileReport) -> Times | None:
    """The times of the engines that were measured for a graph; ``None`` where none was."""
    engines = tuple(_times(graph))
    if not engines:
        return None
    first = engines[0]
    return Times(first.seconds / first.ratio, engines)


def _times(graph: CompileReport) -> Iterator[Time]:
    for each in graph.attempts:
        timing = each.engine.get("timing")
        if each.backend == EAGER or not isinstance(timing, dict):
            continue
        seconds, eager = _seconds(timing.get("ms")), _seconds(timing.get("eager_ms"))
        if seconds and eager:
            ratio = seconds / eager
            percent = min(100 * ratio / LONGEST, 100.0)
            yield Time(each.who, str(each.status), seconds, ratio, percent)


def _seconds(milliseconds: Any) -> float:
    """0 where a record has no time there that can be."""
    return sane(milliseconds / 1000) if isinstance(milliseconds, int | float) else 0.0
