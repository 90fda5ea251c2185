"""The build under way: what an engine is asked, and what it tells.

Between composer and an engine stands Dynamo's signature, a graph and its inputs. One context
variable carries all else across: limits, precision, what may be kept, the shared passes. Whoever
asks sets it for a part of the way (:func:`during`); the functions that read it stand where their
subject does.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from composer.child import NONE, Limits

if TYPE_CHECKING:
    from composer.passes.base import MatchLimit
    from composer.passes.late import LatePasses

Precision = Literal["fp32", "bf16"]
"""What an engine may compute single precision in; inputs and outputs keep their dtypes."""

Freeze = Literal["auto", True, False]
"""Whether engines take weights in as constants: ``"auto"`` leaves it to each, ``True`` has all take
them in that can, ``False`` none."""

DEFAULT_GIB = 2.0
"""How much is kept on disk where no policy says otherwise."""


@dataclass
class Notes:
    """What an engine says of itself while it builds.

    Attributes:
        coverage: Share of the graph's compute nodes that it takes; ``None`` if it did not say.
        taken: How many nodes that is, added up over its graphs (a forward and a backward, say).
        total: Compute nodes of those graphs.
        left: A line for each operator that it leaves to torch.
        keeps_nan: Whether it claims to give NaN wherever eager does; then it is held to that.
        engine: Facts for the attempt's ``engine`` record.
    """

    coverage: float | None = None
    taken: int = 0
    total: int = 0
    left: list[str] = field(default_factory=list)
    keeps_nan: bool = False
    engine: dict[str, Any] = field(default_factory=dict)

    def begin_again(self, engine: Mapping[str, Any]) -> None:
        """Forget all but these facts: the attempt's next build is to tell its own."""
        vars(self).update(vars(Notes(engine=dict(engine))))


@dataclass
class Artefacts:
    """What became of the models of one build, which the lowering keeps on disk.

    Attributes:
        reused: How many were found on disk.
        kept: How many were made, and stored on disk.
        lost: Why each of the others could not be stored.
        whole: Whether the captured graph's model was found, so that AOTAutograd was skipped.
    """

    reused: int = 0
    kept: int = 0
    lost: list[str] = field(default_factory=list)
    whole: bool = False

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentBuild:
    """What holds for the build under way; the defaults hold where an engine is called by itself.

    Attributes:
        limits: What it may take, and whether a child process is to do a part of it.
        clock: Its time; ``None`` where no limits were set.
        precision: What it may compute in, for engines that choose it themselves.
        freeze: The policy's ``freeze``.
        keep_gib: GiB on disk for the artefacts that it keeps; with 0 it keeps and looks for none.
        late: The shared passes that run within AOTAutograd; ``None`` for none.
        inference: Whether the graph at hand, one of AOTAutograd's, has no backward.
        match_limit: How many places a pass may still rewrite, while one is looked for that changes
            the numbers; ``None`` for all.
        made: What has been made of the captured graph, for any engine of the chain; ``None`` where
            nothing is shared.
        notes: What the engine tells; ``None`` where nobody listens.
        artefacts: The count of its models; ``None`` where nobody counts.
    """

    limits: Limits = NONE
    clock: Clock | None = None
    precision: Precision = "fp32"
    freeze: Freeze = "auto"
    keep_gib: float = DEFAULT_GIB
    late: LatePasses | None = None
    inference: bool = True
    match_limit: MatchLimit | None = None
    made: dict[str, object] | None = None
    notes: Notes | None = None
    artefacts: Artefacts | None = None


_NONE = CurrentBuild()
_current: ContextVar[CurrentBuild] = ContextVar("composer_build", default=_NONE)


def current_build() -> CurrentBuild:
    """What holds for the build under way."""
    return _current.get()


@contextmanager
def during(**changes: Any) -> Iterator[CurrentBuild]:
    """Let these fields of :class:`CurrentBuild` hold within; the others stay as they are."""
    token = _current.set(dataclasses.replace(_current.get(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
