"""The measured times of each graph's engines, compared with eager."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from composer.records import EAGER, CompileReport, spelled
from composer.telemetry.html.words import sane

LONGEST = 2.0
"""The largest length of a bar, as a multiple of eager's time. Eager's line is in the middle."""


@dataclass(frozen=True, slots=True)
class Time:
    """The time of a call with one engine.

    Attributes:
        engine: The name of the engine with its options, and its precision if that is not the
            graph's own.
        status: The status of its attempt; the engine that serves has ``succeeded``.
        seconds: The time of a call.
        ratio: That time divided by eager's; below 1 the engine is faster than eager.
        rounds: The number of rounds in which it was measured.
        percent: The width of its bar in per cent.
    """

    engine: str
    status: str
    seconds: float
    ratio: float
    rounds: int
    percent: float


@dataclass(frozen=True, slots=True)
class Times:
    """The engines of one graph, in the order of the attempts.

    ``eager`` is in seconds per call. ``under_load`` is True if other programs used the cores.
    """

    eager: float
    under_load: bool
    engines: tuple[Time, ...]


def times(graph: CompileReport) -> Times | None:
    """Return the times of the engines that were measured for a graph, or ``None``."""
    engines = tuple(_times(graph))
    if not engines:
        return None
    eager = engines[0].seconds / engines[0].ratio
    timings = (each.engine.get("timing") for each in graph.attempts)
    is_under_load = any(isinstance(each, dict) and each.get("under_load") for each in timings)
    return Times(eager, is_under_load, engines)


def _times(graph: CompileReport) -> Iterator[Time]:
    for each in graph.attempts:
        timing = each.engine.get("timing")
        if each.backend == EAGER or not isinstance(timing, dict):
            continue
        seconds = _seconds(timing.get("ms"))
        eager = _seconds(timing.get("eager_ms"))
        if seconds and eager:
            ratio = seconds / eager
            rounds = timing.get("rounds")
            percent = min(100 * ratio / LONGEST, 100.0)
            name = spelled(each.who, each.options)
            counted = rounds if isinstance(rounds, int) else 0
            yield Time(name, str(each.status), seconds, ratio, counted, percent)


def _seconds(milliseconds: Any) -> float:
    """Convert milliseconds to seconds; 0 if the value is not a valid time."""
    if isinstance(milliseconds, int | float):
        return sane(milliseconds / 1000)
    return 0.0
