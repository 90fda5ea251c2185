"""The engine that was measured to be the fastest for a graph, so that none is measured again.

A verdict is a JSON object that a person can read: who won, everyone's times, when, and on what
machine. It may come from a file that others can write. So every text and number is bounded when it
is read, a verdict that contradicts itself is not read, it can only choose among the candidates of
the chain, and the one it chooses is proven and verified like any other.

How long verdicts are kept:

- not at all, if an engine took no part that may take part the next time: one in quarantine, or one
  for which memory was short or the disk full;
- as long as failures, if a candidate failed, took too long, crashed, or seems to have written to
  weights, which may have been the program's doing: it gets another chance. If the limits of a
  build change, it gets one at once;
- a day at most, if there was time for two calls only of a candidate that was close;
- otherwise for the days of ``[cache] verdicts``. The verdict of a benchmark in which an engine
  was missing does not outlive that: the versions of its packages and the machine are part of the
  fingerprint.

A verdict is provisional if other programs kept taking the cores: another candidate may well win on
a quieter machine. It serves until all are measured anew (:mod:`composer.runtime.background`).
"""

from __future__ import annotations

import itertools
import math
import platform
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from composer.errors import SandboxRefusal, causes, first_line
from composer.graphs import sizes
from composer.knowledge.facts import Fact
from composer.knowledge.fingerprint import Fingerprint
from composer.policy import Cache
from composer.records import (
    EAGER,
    Attempt,
    LowPrecision,
    Outcome,
    Reason,
    Status,
    in_precision,
    printable,
)
from composer.system import distribution, hardware
from composer.system.disk import this_process
from composer.system.distribution import version_of

_LONGEST = 1000
_FAILED = (Status.FAILED, Status.TIMED_OUT, Status.CRASHED)
_UNCERTAIN = (Reason.KNOWN_FAILURE, Reason.MUTATED_INPUTS)
_PASSING = (Reason.QUARANTINED, Reason.OUT_OF_MEMORY)
_DAYS_IF_UNSURE = 1.0
_FIGURES = {"ms", "eager_ms", "rounds", "seconds"}
_MOST_SIZES = 64
_NEAR = 1.5
"""A candidate that takes less than this many times as long as the winner might have won, if it had
been measured well."""


def clipped(text: str) -> str:
    """Return text cut to the length that a verdict can hold."""
    return printable(text)[:_LONGEST]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def _complete(timing: dict[str, Any] | None) -> dict[str, Any] | None:
    if timing and not timing.keys() >= _FIGURES:
        raise ValueError(f"lacks some of {', '.join(sorted(_FIGURES))}")
    return timing


Text = Annotated[str, Field(max_length=_LONGEST), AfterValidator(_printable)]
Number = Annotated[int, Field(ge=0, le=1 << 53)] | Annotated[float, Field(ge=0.0, lt=math.inf)]


class CandidateRecord(BaseModel):
    """The result of one candidate, whether or not it took part in the benchmark.

    Attributes:
        backend: The name as the chain spells it.
        status: The status of its attempt.
        reason: The reason of its attempt.
        message: The first line of its attempt's message.
        timing: Its times; ``None`` if it was not measured.
        precision: Its precision, if that is not the graph's own.
    """

    model_config = ConfigDict(frozen=True)

    backend: Text
    status: Status
    reason: Reason | None
    message: Text
    timing: Annotated[dict[Text, Number | bool] | None, AfterValidator(_complete)]
    precision: LowPrecision | None = None

    @property
    def who(self) -> str:
        """The backend, and its precision if that is not the graph's own."""
        return in_precision(self.backend, self.precision)

    @property
    def figures(self) -> dict[str, float]:
        """Its times; empty if it was not measured."""
        return self.timing or {}

    @property
    def milliseconds(self) -> float:
        """The time that it was compared by: a call, plus the counted share of the build."""
        return self.figures["ms"] + self.figures.get("build_ms", 0.0)


class Verdict(Fact):
    """Who is the fastest for one graph, on one kind of machine, with these versions.

    Attributes:
        version: Of the format; 2.
        chosen: The backend that won; ``eager`` for the captured graph itself.
        ranking: Places in the chain of those that may serve, best first; empty where the captured
            graph itself was the fastest.
        candidates: In the order of the chain, as far as it was tried.
        model: Of the graph's report, as ``graph_key`` and ``device`` are.
        machine: The processor or GPU (:func:`composer.system.hardware.describe`).
        threads: torch's number of threads.
        versions: Of torch, Python and the engines' packages.
        limits: The limits of the candidates' builds.
        select_seconds: What the policy allowed for the benchmark at least.
        further: The verdicts at other sizes of the same graph, under ``select`` with ``ranges``.
    """

    kind: ClassVar[str] = "verdicts"
    noun: ClassVar[str] = "verdict"
    depends_on: ClassVar[tuple[str, ...]] = (
        *("graph", "engine", "options", "precision", "build", "terms"),
        *("machine", "settings", "versions"),
    )
    limit: ClassVar[int] = 32 << 20
    is_shared: ClassVar[bool] = True

    version: Literal[2] = 2
    key: Text
    process: Text = Field(default_factory=this_process)
    chosen: Text
    ranking: tuple[int, ...]
    candidates: Annotated[tuple[CandidateRecord, ...], Field(min_length=1)]
    model: Text
    graph_key: Text
    device: Text
    machine: tuple[Text, ...]
    threads: int
    versions: dict[Text, Text]
    limits: tuple[Text, ...]
    select_seconds: Annotated[float, Field(ge=0.0, lt=math.inf)]
    further: Annotated[tuple[Verdict, ...], Field(max_length=_MOST_SIZES)] = ()

    @classmethod
    def of(cls, fingerprint: Fingerprint, outcome: Outcome, seconds: float) -> Verdict:
        """Return the verdict of a benchmark for which the policy allowed at least these seconds."""
        request = fingerprint.request
        packages = {name for each in fingerprint.candidates for name in each.backend.packages}
        named = {name: version_of(name) for name in (*sorted(packages), distribution.NAME)}
        return cls.model_construct(
            key=fingerprint.key(cls.depends_on) or "",
            chosen=outcome.chosen,
            ranking=outcome.ranking or (),
            candidates=tuple(map(record_of, outcome.attempts)),
            model=clipped(request.model),
            graph_key=request.graph_key,
            device=request.device,
            machine=hardware.describe(request.device),
            threads=torch.get_num_threads(),
            versions={
                "torch": torch.__version__,
                "python": platform.python_version(),
                **{name: version for name, version in named.items() if version},
            },
            limits=tuple(fingerprint.limits),
            select_seconds=seconds,
        )

    @classmethod
    def most_days(cls, settings: Cache) -> float:
        """Return the days of ``[cache] verdicts``."""
        return settings.verdicts

    def days(self, settings: Cache) -> float:
        """Return for how many days this verdict holds."""
        days = [settings.verdicts]
        if self.has_failures:
            days.append(settings.failures)
        if self.has_too_few_rounds:
            days.append(_DAYS_IF_UNSURE)
        return min(days + [each.days(settings) for each in self.further])

    def is_about(self, fingerprint: Fingerprint) -> bool:
        """Return False if it is on another chain."""
        names = [each.name for each in fingerprint.candidates]
        own = [each.backend for each in self.candidates]
        is_own = self.key == fingerprint.key(self.depends_on) and own == names[: len(own)]
        return is_own and all(each.is_about(fingerprint) for each in self.further)

    @property
    def size(self) -> float | None:
        """The size of the call that it was measured at; ``None`` if none is dynamic."""
        return self.timed[0].figures.get("size")

    @property
    def at_all_sizes(self) -> tuple[Verdict, ...]:
        """This verdict, and those at the further sizes."""
        return (self, *self.further)

    def nearest(self, size: float | None) -> Verdict:
        """Return the verdict at the size that is the nearest, by the ratio of both."""
        return min(self.at_all_sizes, key=lambda each: sizes.ratio(each.size, size))

    def and_at(self, other: Verdict) -> Verdict:
        """Return this verdict with another one at another size of the graph, if there is room."""
        by_size = {each.size: each for each in (*self.at_all_sizes, other)}
        first, *further = by_size.values()
        return first.model_copy(update={"further": tuple(further[:_MOST_SIZES])})

    def fits(self, fingerprint: Fingerprint) -> bool:
        """Return False if one has failed under limits that are others now."""
        is_fit = not self.has_failures or list(self.limits) == fingerprint.limits
        return is_fit and all(each.fits(fingerprint) for each in self.further)

    def sentence(self) -> str:
        """Return the winner, the model, and the times of all."""
        times = [f"{each.who} {each.milliseconds:.3g} ms" for each in self.timed]
        return "  ".join((self.best.who, self.model, self.device, f"of {', '.join(times)}"))

    @property
    def winner(self) -> int | None:
        """The place of the fastest in the chain; ``None`` for the captured graph itself."""
        return self.ranking[0] if self.ranking else None

    @property
    def best(self) -> CandidateRecord:
        """The record of the fastest; one is made for the captured graph itself."""
        if self.winner is not None:
            return self.candidates[self.winner]
        timing = {"ms": self.timed[0].figures["eager_ms"]}
        return CandidateRecord.model_construct(backend=EAGER, timing=timing, precision=None)

    @property
    def timed(self) -> list[CandidateRecord]:
        """The candidates that were measured."""
        return [each for each in self.candidates if each.timing]

    @property
    def is_provisional(self) -> bool:
        """True if other programs kept taking the cores while the benchmark was run.

        A load may slow one engine down fifty times and another not at all: no lead is a sure one.
        """
        return any(each.figures.get("under_load") for each in self.candidates)

    @property
    def has_too_few_rounds(self) -> bool:
        """True if a candidate that may be the fastest had time for only two calls."""
        unsure = [each.milliseconds for each in self.timed if each.figures["rounds"] == 0]
        return min(unsure, default=math.inf) <= _NEAR * self.best.milliseconds

    @property
    def seconds(self) -> float:
        """How long the benchmark might have taken, as far as that is known."""
        taken = (each.figures["seconds"] for each in self.timed)
        return max(self.select_seconds, *taken)

    @property
    def has_failures(self) -> bool:
        """True if one of the candidates failed, so that it should be tried again some day."""
        return any(each.status in _FAILED or each.reason in _UNCERTAIN for each in self.candidates)

    @model_validator(mode="after")
    def _check_consistency(self) -> Verdict:
        places = dict(enumerate(self.candidates))
        timed = {place for place, each in places.items() if each.timing}
        slower = {place for place, each in places.items() if each.reason is Reason.SLOWER}
        if not timed or not timed >= slower.union(self.ranking):
            raise ValueError("it compares candidates that were not measured")
        if len(set(self.ranking)) < len(self.ranking):
            raise ValueError("it ranks a candidate twice")
        if self.chosen != self.best.backend:
            raise ValueError("the first of the ranking is not the one that was chosen")
        return self


def figures_of(attempt: Attempt) -> dict[str, float] | None:
    """Return the measurements of a candidate; ``None`` if it was not measured."""
    if not isinstance(attempt.timing, dict):
        return None
    return {name: each for name, each in attempt.timing.items() if isinstance(each, int | float)}


def record_of(attempt: Attempt) -> CandidateRecord:
    """Return a verdict's record of a candidate."""
    return CandidateRecord.model_construct(
        backend=attempt.backend,
        status=attempt.status,
        reason=attempt.reason,
        message=clipped(first_line(attempt.message)),
        timing=figures_of(attempt),
        precision=None if attempt.precision == "fp32" else attempt.precision,
    )


def deserves_verdict(outcome: Outcome) -> bool:
    """Return True if a candidate was measured, and none was left out for a temporary cause."""
    if any(each.reason in _PASSING for each in outcome.attempts):
        return False
    errors = itertools.chain.from_iterable(causes(end.error) for end in outcome.ends)
    if any(map(_is_over_soon, errors)):
        return False
    return any(map(figures_of, outcome.attempts))


def _is_over_soon(error: BaseException) -> bool:
    """Return True if the cause is temporary: a full disk, too many open files, a child ended.

    A file that is missing, such as a compiler, stays missing.
    """
    if isinstance(error, SandboxRefusal):
        return error.by_others
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
