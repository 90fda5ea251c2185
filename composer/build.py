"""The request to an engine and its result: :class:`BuildRequest` and :class:`Build`.

A function that Dynamo calls as a backend gets only a graph and its inputs. It reads the rest of the
request from a context variable (:func:`current_build`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch.fx

from composer.errors import refuse
from composer.records import Reason, Status
from composer.system.subprocesses import NONE, Limits

if TYPE_CHECKING:
    from composer.passes.within_aotautograd import LatePasses

T = TypeVar("T")

Precision = Literal["fp32", "bf16", "int8"]
"""The precision that an engine may use for float32; inputs and outputs keep their dtypes. In eight
bits an engine is asked for float32, and given a graph that quantizes."""

Freeze = Literal["auto", True, False]
"""The policy for weights: true makes them constants in all engines that can, false in none, and
``"auto"`` lets each engine decide."""

DEFAULT_GIB = 2.0
"""Default limit in GiB for the models that are kept on disk."""

_UNKNOWN: tuple[Any, ...] = (None, "", (), [])
"""Values of a fact that the engine does not state."""

_NOT_INTERRUPTED = "this engine cannot be interrupted, but in a child process (isolate = true)"


@dataclass(slots=True)
class BuildFacts:
    """What an engine states about one build; the attempt's ``engine`` record contains it.

    If the engine fills in the facts of its request while it builds, the record of a failed attempt
    has them as well.

    Attributes:
        coverage: Share of the graph's work that the engine takes, 0.0 to 1.0; ``None`` if unknown.
            The chain declines a build below the policy's ``min_coverage``.
        taken: This work, in all graphs of the build, such as forward and backward.
        total: The whole work of these graphs.
        left_to_torch: A line for each operator that the engine leaves to torch.
        versions: Versions of the engine's libraries, by name.
        device: The device, as the engine names it.
        precision: The precision, as the engine names it.
        providers: ONNX Runtime's execution providers, or another engine's counterpart.
        threads: Number of threads; ``None`` if unknown.
        keeps_nan: True if the engine returns NaN wherever eager does. ``verify`` then compares a
            second time, on inputs with a NaN.
        extra: Other facts, for people to read. No decision depends on them.
    """

    coverage: float | None = None
    taken: int = 0
    total: int = 0
    left_to_torch: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    precision: str = ""
    providers: Sequence[str] = ()
    threads: int | None = None
    keeps_nan: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def covers(self, taken: int, total: int, left: Sequence[str] = ()) -> None:
        """Add the coverage of one graph.

        Args:
            taken: The work that the engine does, in any unit: floating-point operations, or nodes.
            total: The work of the graph, in the same unit.
            left: A line for each operator that it leaves to torch, with the reason.
        """
        self.taken += taken
        self.total += total
        self.coverage = self.taken / self.total if self.total else None
        self.left_to_torch = [*dict.fromkeys([*self.left_to_torch, *left])]

    def add(self, others: BuildFacts) -> None:
        """Add the facts of another graph of the same build, or later facts of the same graph."""
        if others.total:
            self.covers(others.taken, others.total, others.left_to_torch)
        elif others.coverage is not None:
            self.coverage = others.coverage
        for name in ("device", "precision", "providers", "threads", "keeps_nan"):
            value = getattr(others, name)
            if value not in _UNKNOWN:
                setattr(self, name, value)
        self.versions |= others.versions
        self.extra |= others.extra

    def drop_mistake(self) -> str:
        """Remove a coverage that is no share, which the schema of records does not allow.

        Returns:
            The mistake in words; empty if there is none.
        """
        coverage: object = self.coverage
        is_share = isinstance(coverage, int | float) and 0 <= coverage <= 1
        if coverage is None or is_share:
            return ""
        self.coverage = None
        return f"coverage is a share, 0.0 to 1.0, not {coverage!r}"

    def record(self) -> dict[str, Any]:
        """Return the known facts, in the form of the attempt's ``engine`` record."""
        names = ("device", "precision", "providers", "threads", "keeps_nan", "left_to_torch")
        values = {name: getattr(self, name) for name in names}
        known = {name: value for name, value in values.items() if value not in _UNKNOWN}
        return {**self.versions, **known, **self.extra}


@dataclass(slots=True)
class Artefacts:
    """The models of one build, which engines share and later processes find on disk.

    Attributes:
        keep_gib: Limit in GiB for the models on disk; with 0 none is kept or looked for.
        made: Models of the captured graph that any engine of the chain has made, by key; ``None``
            if nothing is shared.
        reused: Number of models that were found on disk.
        kept: Number of models that were made, and are kept on disk.
        lost: The reason for each model that could not be kept.
        whole: True if the captured graph's model was found, so that AOTAutograd was skipped.
    """

    keep_gib: float = DEFAULT_GIB
    made: dict[str, object] | None = None
    reused: int = 0
    kept: int = 0
    lost: list[str] = field(default_factory=list)
    whole: bool = False

    def once(self, key: str, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which is called once for each key."""
        if self.made is None:
            return make()
        if key not in self.made:
            self.made[key] = make()
        return cast(T, self.made[key])

    def __str__(self) -> str:
        """``"graph reused"``, ``"model reused"``, ``"1 of 3 models reused"``, ``"kept"``, ...

        Empty where no model was asked for: another engine of the chain had it made.
        """
        total = self.reused + self.kept + len(self.lost)
        if self.whole:
            return "graph reused"
        if self.reused == total == 1:
            return "model reused"
        if self.reused:
            return f"{self.reused} of {total} models reused"
        if self.lost:
            return f"not kept: {'; '.join(dict.fromkeys(self.lost))}"
        return "kept" if self.kept else ""


@dataclass(slots=True)
class Clock:
    """When a build began, and the seconds that do not count as build time."""

    began: float = field(default_factory=time.perf_counter)
    excused: float = 0.0

    @property
    def seconds(self) -> float:
        """The build time until now."""
        return time.perf_counter() - self.began - self.excused

    def excuse(self, seconds: float) -> None:
        """Exclude the seconds that a child process took to start."""
        self.excused += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTerms:
    """Everything about a build but its graph; the defaults hold outside of an attempt.

    The terms refer to no tensor, so an engine may keep them for later calls.

    Attributes:
        limits: The build's limits, and if a child process does a part of it.
        clock: The build time.
        precision: The precision that the engine may choose.
        freeze: The policy's ``freeze``.
        late: The shared passes that run within AOTAutograd; ``None`` for none.
        artefacts: The models that this engine, or an earlier one, made of the graph.
        facts: The facts that the engine has stated until now.
    """

    limits: Limits = NONE
    clock: Clock = field(default_factory=Clock)
    precision: Precision = "fp32"
    freeze: Freeze = "auto"
    late: LatePasses | None = None
    artefacts: Artefacts = field(default_factory=Artefacts)
    facts: BuildFacts = field(default_factory=BuildFacts)

    def limits_left(self) -> Limits:
        """Return the limits for the rest of the build, to be done in a child process."""
        if self.limits.timeout is None:
            return self.limits
        left = self.limits.timeout - self.clock.seconds
        return replace(self.limits, timeout=max(left, 1e-3))

    def check_time(self) -> None:
        """Refuse the build if its ``timeout`` is over. Engines call this between their steps.

        Nothing else interrupts a build, since some code of torch must not be interrupted.

        Raises:
            Refusal: ``timed_out``.
        """
        self._refuse_late("was stopped")

    def check_end(self) -> None:
        """Refuse a build that ended later than its ``timeout``.

        Raises:
            Refusal: ``timed_out``.
        """
        hint = "" if self.limits.isolate else f"; {_NOT_INTERRUPTED}"
        self._refuse_late("finished", hint)

    def _refuse_late(self, ended: str, hint: str = "") -> None:
        timeout, seconds = self.limits.timeout, self.clock.seconds
        if timeout is not None and seconds > timeout:
            what = f"{ended} after {seconds:.3g} s, and timeout is {timeout:g} s{hint}"
            refuse(Status.TIMED_OUT, Reason.TIMEOUT, what)


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The request to build one graph.

    Attributes:
        gm: A clone of the graph, which the build may change.
        example_inputs: The inputs of the first call; weights are the originals.
        mode: ``torch.compile``'s mode.
        options: The options of the candidate in the chain.
        terms: The terms of the build: limits, precision, passes, artefacts.
    """

    gm: torch.fx.GraphModule
    example_inputs: list[Any]
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    terms: BuildTerms = field(default_factory=BuildTerms)


@dataclass(frozen=True, slots=True)
class Build:
    """The result of a build.

    Attributes:
        compiled: Takes the graph's inputs, one for each placeholder, and returns its outputs.
        facts: The engine's facts; ``None`` if it filled in those of the request.
    """

    compiled: Callable[..., Any]
    facts: BuildFacts | None = None


_current: ContextVar[BuildTerms | None] = ContextVar("composer_build", default=None)


def current_build() -> BuildTerms:
    """Return the terms of the present build; outside of an attempt, terms without limits."""
    return _current.get() or BuildTerms()


@contextmanager
def building(terms: BuildTerms) -> Iterator[None]:
    """Make :func:`current_build` return these terms within the context."""
    token = _current.set(terms)
    try:
        yield
    finally:
        _current.reset(token)
