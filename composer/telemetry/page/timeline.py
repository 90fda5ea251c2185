"""The compiles of all processes on one axis of time, on which long waits are cut short."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from composer.records import CompileReport
from composer.telemetry.page.spent import Piece, pieces
from composer.telemetry.page.words import sane

_STEPS = (
    *(step * 10.0**power for power in range(-6, 1) for step in (1, 2, 5)),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 18000.0),
)
_CUT = 0.04  # at most this share of the time compiled is what a wait takes on the axis,
_CUTS = 0.25  # and this is what all of them take
_APART = (12.0, 3.0, 0.75)  # per cent of the axis from one tick to the next, the closer looked at


@dataclass(frozen=True, slots=True)
class Bar:
    """One graph on the axis. ``left``, ``width``: per cent of it; ``alone``: of the longest."""

    pieces: tuple[Piece, ...]
    seconds: float
    left: float
    width: float
    alone: float

    def share(self, piece: Piece) -> float:
        """A piece's width in per cent of its bar; where nothing took time, all are as wide."""
        if not self.seconds:
            return 100 / max(len(self.pieces), 1)
        return 100 * piece.seconds / self.seconds


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which nothing was compiled; ``cut`` if it is drawn shorter than it was."""

    left: float
    width: float
    seconds: float
    cut: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """``seconds`` since the first compile began."""

    left: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """``bars`` in the order of the graphs given; ``began`` and ``ended`` are POSIX times.

    ``ticks`` are there for the whole axis in view, for a quarter and for a sixteenth of it.
    """

    bars: tuple[Bar, ...]
    waits: tuple[Wait, ...]
    ticks: tuple[tuple[Tick, ...], ...]
    began: float
    ended: float


def timeline(graphs: Sequence[CompileReport]) -> Timeline:
    """Lay the graphs of all processes on one axis."""
    found = [pieces(graph) for graph in graphs]
    seconds = [sum(piece.seconds for piece in each) for each in found]
    ends = list(_ends(graphs))
    starts = [end - length for end, length in zip(ends, seconds, strict=True)]
    axis = Axis(list(zip(starts, ends, strict=True)))
    longest = max(seconds, default=0.0) or 1.0
    bars = (
        Bar(each, length, axis.at(start), axis.at(end) - axis.at(start), 100 * length / longest)
        for each, length, start, end in zip(found, seconds, starts, ends, strict=True)
    )
    began, ended = min(starts, default=0.0), max(ends, default=0.0)
    ticks = tuple(tuple(axis.ticks(apart)) for apart in _APART)
    return Timeline(tuple(bars), axis.waits(), ticks, began, ended)


def _ends(graphs: Sequence[CompileReport]) -> Iterator[float]:
    """POSIX times at which compiles ended; one that cannot be read follows on the one before."""
    end = 0.0
    for graph in graphs:
        try:
            time = datetime.fromisoformat(graph.time)
            end = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            end += sane(graph.seconds)
        yield end


class Axis:
    """Time, straight where something was compiled; a wait takes no more than a small share."""

    def __init__(self, busy: Sequence[tuple[float, float]]) -> None:
        self._busy = _merged(busy)
        compiled = sum(end - start for start, end in self._busy) or 1.0
        gaps = max(len(self._busy) - 1, 1)
        self._most = compiled * min(_CUT, _CUTS / gaps)
        self._offsets = list(self._places())
        self._length = self._offsets[-1] + _length(self._busy[-1]) if self._busy else 0.0

    def _places(self) -> Iterator[float]:
        """Where on the axis each busy stretch begins."""
        place = 0.0
        for i, (start, end) in enumerate(self._busy):
            place += min(start - self._busy[i - 1][1], self._most) if i else 0.0
            yield place
            place += end - start

    def at(self, time: float) -> float:
        """Where a time within a busy stretch is, in per cent of the axis."""
        if not self._length:
            return 0.0
        i = bisect_left(self._busy, time, key=lambda stretch: stretch[1])
        return 100 * (self._offsets[i] + time - self._busy[i][0]) / self._length

    def waits(self) -> tuple[Wait, ...]:
        """What lies between the busy stretches."""
        pairs = zip(self._busy, self._busy[1:], strict=False)
        found = ((end, start, self.at(end), self.at(start)) for (_, end), (start, _) in pairs)
        return tuple(
            Wait(left, right - left, start - end, cut=start - end > self._most)
            for end, start, left, right in found
        )

    def ticks(self, apart: float) -> Iterator[Tick]:
        """Round numbers of seconds since the first start, so many per cent of the axis apart."""
        if not self._length:
            return
        step, last = _round_step(self._length * apart / 75), -100.0
        for start, end in self._busy:
            first = self._busy[0][0]
            number = math.ceil((start - first) / step)
            while first + number * step <= end:
                left = self.at(first + number * step)
                if left - last >= apart and left <= 100 - apart / 2:
                    yield Tick(left, number * step)
                    last = left
                number += 1


def _merged(busy: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(busy):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(stretch: tuple[float, float]) -> float:
    return stretch[1] - stretch[0]


def _round_step(least: float) -> float:
    """A round number of seconds, at least ``least``; beyond a few hours, whole days."""
    return next((step for step in _STEPS if step >= least), 86400.0 * math.ceil(least / 86400))
