"""Puts the compiles of all processes on one time axis, on which long waits are shortened."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from composer.records import CompileReport
from composer.telemetry.html.spent import Piece, pieces
from composer.telemetry.html.words import sane

_STEPS = (
    *(step * 10.0**power for power in range(-6, 1) for step in (1, 2, 5)),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 18000.0),
)
_CUT = 0.04  # the largest length of one wait on the axis, as a share of the time of all compiles
_CUTS = 0.25  # the largest length of all waits together, as a share of the same time
_APART = (12.0, 3.0, 0.75)  # the distance of ticks in per cent of the axis, for each zoom level


@dataclass(frozen=True, slots=True)
class Bar:
    """One graph on the axis.

    ``left`` and ``width`` are in per cent of the axis. ``alone`` is the length in per cent of the
    longest bar.
    """

    pieces: tuple[Piece, ...]
    seconds: float
    left: float
    width: float
    alone: float

    def share(self, piece: Piece) -> float:
        """Return a piece's width in per cent of its bar; equal widths if no piece took time."""
        if not self.seconds:
            return 100 / max(len(self.pieces), 1)
        return 100 * piece.seconds / self.seconds


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which nothing was compiled. ``cut`` is true if it is drawn shorter than it was."""

    left: float
    width: float
    seconds: float
    cut: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the axis. ``seconds`` counts from the start of the first compile."""

    left: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The graphs on one axis.

    Attributes:
        bars: One bar for each graph, in the order of the graphs.
        waits: The times between compiles.
        ticks: Ticks for three zoom levels: the whole axis, a quarter, and a sixteenth of it.
        began: The start of the first compile, a POSIX time.
        ended: The end of the last compile, a POSIX time.
    """

    bars: tuple[Bar, ...]
    waits: tuple[Wait, ...]
    ticks: tuple[tuple[Tick, ...], ...]
    began: float
    ended: float


def timeline(graphs: Sequence[CompileReport]) -> Timeline:
    """Lay the graphs of all processes on one axis."""
    compiles = list(_compiles(graphs))
    axis = Axis([(each.start, each.end) for each in compiles])
    longest = max((each.seconds for each in compiles), default=0.0) or 1.0
    bars = []
    for each in compiles:
        left, width = axis.span(each.start, each.end)
        bars.append(Bar(each.pieces, each.seconds, left, width, 100 * each.seconds / longest))
    ticks = tuple(tuple(axis.ticks(apart)) for apart in _APART)
    return Timeline(tuple(bars), tuple(axis.waits()), ticks, axis.began, axis.ended)


class _Compile(NamedTuple):
    """One compile; ``start`` and ``end`` are POSIX times."""

    pieces: tuple[Piece, ...]
    seconds: float
    start: float
    end: float


def _compiles(graphs: Sequence[CompileReport]) -> Iterator[_Compile]:
    """Yield the compile of each graph.

    If its time cannot be read, it is assumed to follow directly on the one before.
    """
    end = 0.0
    for graph in graphs:
        try:
            time = datetime.fromisoformat(graph.time)
            if time.tzinfo is None:
                time = time.replace(tzinfo=UTC)
            end = time.timestamp()
        except (ValueError, OverflowError):
            end += sane(graph.seconds)
        parts = pieces(graph)
        seconds = sum(piece.seconds for piece in parts)
        yield _Compile(parts, seconds, end - seconds, end)


class Axis:
    """A time axis: linear while something is compiled, with a limit on the length of waits."""

    def __init__(self, busy: Sequence[tuple[float, float]]) -> None:
        self._busy = _merged(busy) or [(0.0, 0.0)]
        self.began, self.ended = self._busy[0][0], self._busy[-1][1]
        compiled = sum(end - start for start, end in self._busy) or 1.0
        gaps = max(len(self._busy) - 1, 1)
        self._longest_wait = compiled * min(_CUT, _CUTS / gaps)
        self._offsets = list(self._places())
        last_start, _ = self._busy[-1]
        self._length = self._offsets[-1] + self.ended - last_start

    def _places(self) -> Iterator[float]:
        """Yield the position at which each busy interval begins, in seconds."""
        place, ended = 0.0, self.began
        for start, end in self._busy:
            place += min(start - ended, self._longest_wait)
            yield place
            place += end - start
            ended = end

    def at(self, time: float) -> float:
        """Return the position of a time within a busy interval, in per cent of the axis."""
        if not self._length:
            return 0.0
        i = bisect_left(self._busy, time, key=lambda interval: interval[1])
        return 100 * (self._offsets[i] + time - self._busy[i][0]) / self._length

    def span(self, start: float, end: float) -> tuple[float, float]:
        """Return the position and the width of an interval, in per cent of the axis."""
        left = self.at(start)
        return left, self.at(end) - left

    def waits(self) -> Iterator[Wait]:
        """Yield the waits between the busy intervals."""
        for (_, end), (start, _) in pairwise(self._busy):
            seconds = start - end
            yield Wait(*self.span(end, start), seconds, cut=seconds > self._longest_wait)

    def ticks(self, apart: float) -> Iterator[Tick]:
        """Yield ticks at round numbers of seconds, at least ``apart`` per cent from each other."""
        if not self._length:
            return
        last = -100.0
        for seconds in self._multiples(_round_step(self._length * apart / 75)):
            left = self.at(self.began + seconds)
            if left - last >= apart and left <= 100 - apart / 2:
                yield Tick(left, seconds)
                last = left

    def _multiples(self, step: float) -> Iterator[float]:
        """Yield the multiples of a step that are in busy intervals, in seconds from the start."""
        for start, end in self._busy:
            number = math.ceil((start - self.began) / step)
            while self.began + number * step <= end:
                yield number * step
                number += 1


def _merged(busy: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(busy):
        if merged and start <= merged[-1][1]:
            start, earlier_end = merged.pop()
            end = max(end, earlier_end)
        merged.append((start, end))
    return merged


def _round_step(least: float) -> float:
    """Return a round number of seconds, at least ``least``; above five hours, whole days."""
    for step in _STEPS:
        if step >= least:
            return step
    return 86400.0 * math.ceil(least / 86400)
