"""The stored form of a verdict: a benchmark's measurements of a graph's candidates, and the winner.

It may come from a file that others can write. So every text and number is bounded when it is read,
and a verdict that contradicts itself is not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from composer.errors import first_line
from composer.records import EAGER, Attempt, Reason, Status, in_precision, printable

_LONGEST = 1000
_FAILED = (Status.FAILED, Status.TIMED_OUT, Status.CRASHED)
_UNCERTAIN = (Reason.KNOWN_FAILURE, Reason.MUTATED_INPUTS)
_FIGURES = {"ms", "eager_ms", "rounds", "seconds"}
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
        products_in_fp32: How many of the first products stay in float32.
    """

    model_config = ConfigDict(frozen=True)

    backend: Text
    status: Status
    reason: Reason | None
    message: Text
    timing: Annotated[dict[Text, Number | bool] | None, AfterValidator(_complete)]
    precision: Literal["bf16"] | None = None
    products_in_fp32: Annotated[int, Field(ge=0)] = 0

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


class Verdict(BaseModel):
    """Who is the fastest for one graph, on one kind of machine, with these versions.

    Attributes:
        version: Of the format; 1.
        key: What the verdict is kept under.
        measured: When the benchmark was run.
        chosen: The backend that won; ``eager`` for the captured graph itself.
        ranking: Places in the chain of those that may serve, best first; empty where the captured
            graph itself was the fastest.
        candidates: In the order of the chain, as far as it was tried.
        model: Of the graph's report, as ``graph_key`` and ``device`` are.
        machine: The processor or GPU (:func:`composer.system.hardware.describe`).
        threads: torch's number of threads.
        versions: Of torch, Python and the engines' packages.
        process: The one that ran the benchmark (:func:`composer.system.disk.this_process`).
        select_seconds: What the policy allowed for the benchmark at least.
    """

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    key: Text
    measured: AwareDatetime
    chosen: Text
    ranking: tuple[int, ...]
    candidates: Annotated[tuple[CandidateRecord, ...], Field(min_length=1)]
    model: Text
    graph_key: Text
    device: Text
    machine: tuple[Text, ...]
    threads: int
    versions: dict[Text, Text]
    process: Text
    select_seconds: Annotated[float, Field(ge=0.0, lt=math.inf)] | None = None

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
    def under_load(self) -> bool:
        """True if other programs kept taking the cores while the benchmark was run."""
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
        return max(self.select_seconds or 0.0, *taken)

    @property
    def has_failures(self) -> bool:
        """True if one of the candidates failed, so that it should be tried again some day."""
        return any(each.status in _FAILED or each.reason in _UNCERTAIN for each in self.candidates)

    def fits(self, key: str, names: Sequence[str]) -> bool:
        """Return True if it is for this key and chain."""
        own = [each.backend for each in self.candidates]
        return self.key == key and own == list(names[: len(own)])

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
        precision="bf16" if attempt.precision == "bf16" else None,
        products_in_fp32=attempt.products_in_fp32,
    )
