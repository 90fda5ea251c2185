"""A benchmark: what the policy asks for, who takes part, and the result."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer.chain import verify
from composer.chain.select.rules import TIE, at_most, ratios, times_as_fast
from composer.policy import Cache, Policy
from composer.records import GraphRequest

SHARE, LEAST, MOST = 0.15, 1.0, 5.0
"""The time of a benchmark if the policy gives none: a share of the build time, within limits. First
calls may take the same share or the upper limit, whichever is longer."""

MOST_BESIDE = 30.0
"""The upper limit in a process that stands back while the program runs."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a benchmark may take.

    Attributes:
        seconds: For all but the first call of each participant. In that call an engine may compile,
            allocate and tune, so it belongs to the build.
        first: Seconds for those first calls. If they take longer, the rest counts in ``seconds``.
        least_rounds: Rounds that every participant takes part in, however far behind it is, if
            there is time. A choice needs none; a table that compares all participants does.
    """

    seconds: float
    first: float = 0.0
    least_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The policy's settings for a choice by measurement.

    Attributes:
        seconds: How long it may take in all; ``None`` for a share of the build time.
        calls: The number of calls over which the build time is spread; ``None`` leaves it out.
        ranges: How many engines a graph with dynamic sizes may keep.
        cache: The settings of what is kept on disk. Under ``strict`` no verdict is.
        renews: True if a provisional choice serves until it is made anew beside the program.
        most: The upper limit of its time in seconds, if that is a share of the build time.
    """

    seconds: float | None = None
    calls: int | None = None
    cache: Cache = Cache(verdicts=0.0)  # noqa: RUF009  # frozen
    ranges: int = 1
    renews: bool = False
    most: float = MOST

    @staticmethod
    def of(policy: Policy, cache: Cache) -> Benchmark | None:
        """Return the benchmark that a policy asks for; ``None`` for ``select = "first"``."""
        select = policy.select
        if select.by == "first":
            return None
        calls = select.calls if select.objective == "amortised" else None
        ranges = select.ranges
        if policy.strict:
            cache = cache.model_copy(update={"verdicts": 0.0})
            ranges = 1  # later builds could not raise for a candidate that is refused
        renews = select.background and ranges == 1 and not policy.strict
        return Benchmark(select.seconds, calls, cache, ranges, renews)

    @property
    def least_seconds(self) -> float:
        """How long it may take at least. An unsure verdict of less time is not used."""
        return LEAST if self.seconds is None else self.seconds

    def budget(self, built: float) -> Budget:
        """The time for a benchmark among engines that took ``built`` seconds to build."""
        if self.seconds is not None:
            return Budget(self.seconds)
        share = SHARE * built
        return Budget(seconds=min(self.most, max(LEAST, share)), first=max(self.most, share))


@dataclass(frozen=True, slots=True)
class Participant:
    """One of the callables that a benchmark compares.

    Attributes:
        name: The backend, for messages.
        run: What is called.
        build_share: Seconds of the build that are added to each call; 0 where builds do not count.
    """

    name: str
    run: Callable[..., Any]
    build_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """The measurements of one participant.

    Attributes:
        samples: Seconds of a call, one figure for each sample.
        rounds: How many rounds it took part in; 0 if there was only time for the warm-up.
        build_share: As in :class:`Participant`.
    """

    samples: tuple[float, ...]
    rounds: int
    build_share: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a call: the median of the samples."""
        return statistics.median(self.samples)

    @property
    def cost(self) -> float:
        """Seconds of a call plus the build share."""
        return self.seconds + self.build_share

    @property
    def costs(self) -> list[float]:
        """What participants are compared by, round by round: the samples plus the build share."""
        return [each + self.build_share for each in self.samples]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a benchmark; participants are named by their places.

    Attributes:
        winner: The participant that is to serve; ``None`` if the benchmark could not be run.
        timings: The timings of the participants that were measured.
        errors: The errors of the participants that raised.
        why: Why the benchmark could not be run.
        under_load: True if other programs kept taking the cores meanwhile.
        seconds: How long it took.
        size: The size of the call (:mod:`composer.graphs.sizes`); ``None`` if none is dynamic.
    """

    winner: int | None
    timings: Mapping[int, Timing]
    errors: Mapping[int, BaseException]
    why: str = ""
    under_load: bool = False
    seconds: float = 0.0
    size: int | None = None

    @property
    def best(self) -> Timing:
        """The timing of the winner."""
        assert self.winner is not None
        return self.timings[self.winner]

    @property
    def fallback(self) -> int:
        """The place of the eager fallback, which is the last, if the benchmark could be run."""
        return max(self.timings)

    def ranking(self, participants: int) -> list[int]:
        """Return the winner, then those that may serve if it fails, best first, none behind eager.

        If nothing was measured, these are all that did not raise, in the order of the chain.

        Args:
            participants: The number of participants.
        """
        if self.winner is None:
            return [place for place in range(participants) if place not in self.errors]
        if self.winner == self.fallback:
            return [self.fallback]
        eager = self.timings[self.fallback].costs
        costs = {p: statistics.median(ratios(eager, e.costs)) for p, e in self.timings.items()}
        by_cost = sorted(at_most(TIE, costs), key=costs.__getitem__)
        return list(dict.fromkeys((self.winner, *by_cost)))

    def figures(self, place: int) -> dict[str, Any]:
        """Return the times of a participant for its record, with eager's time for comparison."""
        timing, eager = self.timings[place], self.timings[self.fallback]
        figures: dict[str, Any] = {
            "ms": in_ms(timing.seconds),
            "least_ms": in_ms(min(timing.samples)),
            "ratio": round(statistics.median(ratios(self.best.samples, timing.samples)), 4),
            "rounds": timing.rounds,
            "eager_ms": in_ms(eager.seconds),
            "seconds": round(self.seconds, 4),
        }
        if min(timing.rounds, eager.rounds) >= 2 and place != self.fallback:
            median, low, high = times_as_fast(timing.samples, eager.samples)
            figures["over_eager"] = round(median, 4)
            figures["over_eager_p25"] = round(low, 4)
            figures["over_eager_p75"] = round(high, 4)
        if timing.build_share:
            figures["build_ms"] = in_ms(timing.build_share)
        if self.under_load:
            figures["under_load"] = True
        if self.size is not None:
            figures["size"] = self.size
        return figures


def in_ms(seconds: float) -> float:
    """Return milliseconds, rounded to four digits."""
    return float(f"{seconds * 1e3:.4g}")


def obstacle(request: GraphRequest, *, among_ranks: bool) -> str:
    """Return why a graph's engines cannot be measured; empty if they can.

    Args:
        request: The graph and the first call's inputs.
        among_ranks: True if other ranks of ``torch.distributed`` have to take the same engine.
    """
    if why := verify.obstacle(request):
        return why
    if among_ranks:
        return "all ranks are to take the same engine, and each would measure another"
    return ""
