"""What an engine is asked, and what it answers: :class:`BuildRequest` and :class:`Build`.

Where Dynamo's signature stands between composer and an engine, a graph and its inputs, one context
variable carries the rest of the request across (:func:`current_build`).
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

Precision = Literal["fp32", "bf16"]
"""What an engine may compute single precision in; inputs and outputs keep their dtypes."""

Freeze = Literal["auto", True, False]
"""Whether engines take weights in as constants: ``"auto"`` leaves it to each, ``True`` has all take
them in that can, ``False`` none."""

DEFAULT_GIB = 2.0
"""How much is kept on disk where no policy says otherwise."""

_NOT_INTERRUPTED = "this engine cannot be interrupted, but in a child process (isolate = true)"


@dataclass(slots=True)
class BuildFacts:
    """What an engine says of one build. It stands in the attempt's ``engine`` record.

    An engine may fill in the facts of its request while it builds: they are then in the record of
    an attempt that fails as well.

    Attributes:
        coverage: Share of the graph's compute nodes that it takes, 0.0 to 1.0; ``None`` if it does
            not say. Where it is below the policy's ``min_coverage``, the chain declines the build.
        taken: How many nodes that is, added up over its graphs (a forward and a backward, say).
        total: Compute nodes of those graphs.
        left_to_torch: A line for each operator that it leaves to torch.
        versions: Of the libraries that it consists of, by their names.
        device: What it runs on, in its own words.
        precision: What it computes in, in its own words.
        providers: ONNX Runtime's execution providers, or their like.
        threads: How many it computes with; ``None`` if it does not say.
        keeps_nan: Whether it gives NaN wherever eager does. Under ``verify`` an engine that says so
            is compared a second time, on inputs with a NaN.
        extra: Anything else, for people to read; nothing is decided by it.
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
        """Add how much of one graph the engine takes.

        Args:
            taken: Compute nodes that the engine runs.
            total: Compute nodes of the graph.
            left: A line for each operator that it leaves to torch, with the reason.
        """
        self.taken, self.total = self.taken + taken, self.total + total
        self.coverage = self.taken / self.total if self.total else None
        self.left_to_torch += [line for line in left if line not in self.left_to_torch]

    def add(self, others: BuildFacts) -> None:
        """Add what is said of another graph of the same build, or later of the same graph."""
        if others.total:
            self.covers(others.taken, others.total, others.left_to_torch)
        elif others.coverage is not None:
            self.coverage = others.coverage
        for name in ("device", "precision", "providers", "threads", "keeps_nan"):
            said = getattr(others, name)
            setattr(self, name, getattr(self, name) if said in (None, "", ()) else said)
        self.versions |= others.versions
        self.extra |= others.extra

    def check(self) -> None:
        """Forget a coverage that is no share: a record would hold what its schema does not allow.

        Raises:
            ValueError: it was none.
        """
        told = self.coverage
        if told is not None and not 0 <= told <= 1:
            self.coverage = None
            raise ValueError(f"coverage is a share, 0.0 to 1.0, not {told!r}")

    def record(self) -> dict[str, Any]:
        """What is told, as the attempt's ``engine`` has it."""
        told = {
            "device": self.device or None,
            "precision": self.precision or None,
            "providers": self.providers or None,
            "threads": self.threads,
            "keeps_nan": self.keeps_nan,
            "left_to_torch": self.left_to_torch or None,
        }
        said = {name: each for name, each in told.items() if each is not None}
        return {**self.versions, **said, **self.extra}


@dataclass(slots=True)
class Artefacts:
    """The models of one build: which are made once for all engines, and which are kept on disk.

    Attributes:
        keep_gib: GiB on disk for what is kept; with 0 nothing is kept or looked for.
        made: What has been made of the captured graph, for any engine of the chain, by its key;
            ``None`` where nothing is shared.
        reused: How many were found on disk.
        kept: How many were made, and stored on disk.
        lost: Why each of the others could not be stored.
        whole: Whether the captured graph's model was found, so that AOTAutograd was skipped.
    """

    keep_gib: float = DEFAULT_GIB
    made: dict[str, object] | None = None
    reused: int = 0
    kept: int = 0
    lost: list[str] = field(default_factory=list)
    whole: bool = False

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What ``make`` returns; made already, where the same key was asked for before."""
        if self.made is None:
            return make()
        if key not in self.made:
            self.made[key] = make()
        return cast(T, self.made[key])

    def off_disk(self) -> Artefacts:
        """The same models, of which none is kept on disk or looked for there."""
        return Artefacts(0.0, self.made)

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
    """When a build began, and the seconds that do not count as its own."""

    began: float = field(default_factory=time.perf_counter)
    excused: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it has taken by now."""
        return time.perf_counter() - self.began - self.excused

    def excuse(self, seconds: float) -> None:
        """Do not count so many seconds: a child process took them to start."""
        self.excused += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTerms:
    """What holds for a build besides its graph; the defaults hold outside of an attempt.

    It refers to no tensor, so what an engine keeps for later calls may refer to it.

    Attributes:
        limits: What the build may take, and whether a child process is to do a part of it.
        clock: Its time.
        precision: What an engine that chooses it itself may compute in.
        freeze: The policy's ``freeze``.
        late: The shared passes that run within AOTAutograd; ``None`` for none.
        artefacts: The models that it makes, and what other engines made of the graph.
        facts: What the engine has said by now.
    """

    limits: Limits = NONE
    clock: Clock = field(default_factory=Clock)
    precision: Precision = "fp32"
    freeze: Freeze = "auto"
    late: LatePasses | None = None
    artefacts: Artefacts = field(default_factory=Artefacts)
    facts: BuildFacts = field(default_factory=BuildFacts)

    def limits_left(self) -> Limits:
        """What is left of the limits, for a part of the build in a child process."""
        if self.limits.timeout is None:
            return self.limits
        return replace(self.limits, timeout=max(self.limits.timeout - self.clock.seconds, 1e-3))

    def check_time(self) -> None:
        """End the attempt if its ``timeout`` is over; engines ask between their steps.

        Nothing else interrupts a build: an exception from outside could strike within code of
        torch's that must not be interrupted.

        Raises:
            Refusal: ``timed_out``.
        """
        self._refuse_late("was stopped")

    def check_end(self) -> None:
        """Refuse a build that ended later than its ``timeout``.

        Raises:
            Refusal: ``timed_out``.
        """
        self._refuse_late("finished", hint="" if self.limits.isolate else f"; {_NOT_INTERRUPTED}")

    def _refuse_late(self, ended: str, hint: str = "") -> None:
        timeout, seconds = self.limits.timeout, self.clock.seconds
        if timeout is not None and seconds > timeout:
            what = f"{ended} after {seconds:.3g} s, and timeout is {timeout:g} s{hint}"
            refuse(Status.TIMED_OUT, Reason.TIMEOUT, what)


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What an engine is asked to build.

    Attributes:
        gm: A clone of the graph, which the build may change as it likes.
        example_inputs: The inputs of the first call; weights are the originals.
        mode: ``torch.compile``'s mode.
        options: The candidate's options, as the chain gave them.
        terms: What else holds: limits, precision, passes, artefacts.
    """

    gm: torch.fx.GraphModule
    example_inputs: list[Any]
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    terms: BuildTerms = field(default_factory=BuildTerms)


@dataclass(frozen=True, slots=True)
class Build:
    """What an engine answers.

    Attributes:
        compiled: Takes the graph's inputs, one for each placeholder, and returns its outputs.
        facts: What the engine says of it. Without them the facts of the request hold.
    """

    compiled: Callable[..., Any]
    facts: BuildFacts | None = None


_current: ContextVar[BuildTerms | None] = ContextVar("composer_build", default=None)


def current_build() -> BuildTerms:
    """The terms of the build under way, for a function that Dynamo calls as a backend.

    Outside of an attempt no limits hold, and nobody reads the facts.
    """
    return _current.get() or BuildTerms()


@contextmanager
def building(terms: BuildTerms) -> Iterator[None]:
    """Have :func:`current_build` give these terms within."""
    token = _current.set(terms)
    try:
        yield
    finally:
        _current.reset(token)
