"""What a pass is: a class that edits one graph in place, and says how often."""

from __future__ import annotations

import copy
import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch.fx

from composer.errors import OptionError
from composer.passes.fingerprint import (
    Unstable,
    digest,
    fields_of,
    members_of_class,
    source_of_class,
    source_of_module,
)
from composer.records import Stage
from composer.registry import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PassResult:
    """What one run of a pass did: whether the graph changed, in how many places (if counted)."""

    changed: bool
    matches: int | None = None


SHARED_MODULES = (
    "composer.graphs.nodes",
    "composer.graphs.norms",
    "composer.graphs.writes",
    "composer.passes.aliasing",
    "composer.passes.gradients",
    "composer.passes.metadata",
    "composer.passes.modes",
    "composer.passes.purity",
    "composer.passes.snapshot",
)
"""The modules that composer's own rewrites are made of, beside the file of each."""


class GraphPass(ABC):
    """One rewrite: one class, one file, one name. Its options are its fields.

    A subclass that has options is decorated with ``@dataclass``, best a frozen one, or keeps what a
    constructor of its own is given.

    **Before** :meth:`run`, the graph passes ``lint``, is in topological order and every node
    carries its fake value: ``meta["example_value"]`` at stage ``torch``, ``meta["val"]`` at all
    others. It belongs to composer: the captured graph, the user's module and the values of weights
    are never to be touched.

    **After** it, the graph has the same placeholders in the same order and as many outputs with
    the same shape, dtype, device (and strides, at ``torch`` and ``aten``), has no cycle, and
    every new operation can be run on its inputs' fake values. Order and metadata of new nodes need
    no care: the pipeline sorts the nodes, and computes the fake values of what changed and of all
    that hangs on it. A pass that breaks the rule, or raises, is rolled back and recorded; under
    ``on_pass_error="raise"`` it raises :class:`~composer.errors.PassError`.

    A pass keeps no state between runs and may run on several threads at once.
    """

    name: ClassVar[str] = ""
    """The recorded name; the class's own name in snake case where it is not given."""

    stage: ClassVar[Stage | str] = Stage.ATEN

    runs_last: ClassVar[bool] = False
    """At ``joint`` and ``post_grad``: behind Inductor's own rewrites of that stage rather than in
    front of them. For every engine it runs behind the passes of the stage that do not say so."""

    eliminates_dead_code: ClassVar[bool] = True
    """Whether operations that nobody reads are dropped after a run that changed something. What
    writes to its inputs, draws random numbers or changes torch's state always stays."""

    keeps_numbers: ClassVar[bool] = False
    """Whether the graph computes the same as before, up to rounding. Under the policy's ``verify``
    composer compares the two, and takes a pass that breaks its word for one that failed."""

    depends_on: ClassVar[tuple[str, ...]] = ()
    """Other modules than its own, by name, whose source decides what the pass does."""

    _limit: ClassVar[MatchLimit | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = snake_case(cls.__name__)
        if isinstance(cls.__dict__.get("stage"), str):
            cls.stage = as_stage(cls.stage)

    @abstractmethod
    def run(self, gm: torch.fx.GraphModule) -> int | PassResult | None:
        """Rewrite ``gm`` in place.

        Returns:
            How many places were rewritten; ``None`` where that is not counted.
        """

    def for_graph(self, *, inference: bool) -> GraphPass:
        """The pass as it runs on one of AOTAutograd's graphs; ``inference``: without a backward."""
        return self

    def limited(self, limit: MatchLimit) -> Self:
        """A copy of the pass that :meth:`chosen` gives no more places than the limit allows."""
        twin = copy.copy(self)
        object.__setattr__(twin, "_limit", limit)
        return twin

    def uuid(self) -> str | None:
        """SHA-256 over the class's file, the modules it names, what it holds, and its parameters.

        Part of composer's ``graph_key`` and of the key of Inductor's caches. ``None`` where a
        parameter, or an attribute of the class, has no text that is equal in every process:
        Inductor's caches are then bypassed.
        """
        modules = [source_of_module(name) for name in self.depends_on]
        source = source_of_class(type(self), GraphPass)
        held = members_of_class(type(self), GraphPass)
        try:
            return digest(self.name, str(self.stage), source, held, modules, self._parameters())
        except Unstable:
            return None

    def _parameters(self) -> dict[str, Any]:
        """What :meth:`uuid` covers of the instance: its fields, and what else it was given to keep.

        What it computes once and keeps follows from the rest.
        """
        fields = {each.name: getattr(self, each.name) for each in fields_of(self)}
        kept = {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(type(self), name, None), functools.cached_property)
            and name != "_limit"
        }
        return {**fields, **kept}

    def chosen(self, places: Iterable[T]) -> Iterator[T]:
        """The places to rewrite: all, or as many as :func:`composer.passes.bisect` allows.

        A pass that iterates over ``self.chosen(...)`` lets the bisection find the match that
        changed the numbers, not only the pass.
        """
        for place in places:
            if self._limit is not None and not self._limit.take():
                return
            yield place


class MatchLimit:
    """How many more matches may be rewritten; ``taken`` is how many have been.

    Args:
        most: How many in all; by default there is no end of them.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self.taken = 0

    def take(self) -> bool:
        """Whether one more place may be rewritten; counts it."""
        if self.taken >= self._most:
            return False
        self.taken += 1
        return True


def snake_case(name: str) -> str:
    """``"fold_batch_norm"`` for ``FoldBatchNorm``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def as_stage(name: str, of_pass: str = "") -> Stage:
    """The stage of that name.

    Args:
        name: The stage.
        of_pass: The pass that names it, for the message; empty where the traceback shows it.

    Raises:
        OptionError: there is none.
    """
    try:
        return Stage(name)
    except ValueError:
        known = [stage.value for stage in Stage]
        guess = did_you_mean(str(name), known)
        whose = f"pass {of_pass!r}: " if of_pass else ""
        what = f"{whose}unknown stage {name!r}{guess} (accepted: {', '.join(known)})"
        raise OptionError(what) from None
