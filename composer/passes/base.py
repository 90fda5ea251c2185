"""The base class of passes. A pass edits one graph in place, and counts the places it rewrote."""

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
from composer.passes.digests import (
    Unstable,
    digest,
    members_of_class,
    source_of_class,
    source_of_module,
    values_of,
)
from composer.records import Stage
from composer.registry import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of one run of a pass.

    ``changed`` is true if the graph changed. ``matches`` is the number of places that were
    rewritten, or ``None`` if the pass does not count them.
    """

    changed: bool
    matches: int | None = None


SHARED_MODULES = (
    "composer.graphs.comparison",
    "composer.graphs.nodes",
    "composer.graphs.writes",
    "composer.passes.aliasing",
    "composer.passes.gradients",
    "composer.passes.metadata",
    "composer.passes.node_modes",
    "composer.passes.order",
    "composer.passes.purity",
    "composer.passes.snapshot",
)
"""The modules that composer's own passes share: the ``depends_on`` of each of them."""


class GraphPass(ABC):
    """One rewrite of a graph: one class, one file, one name. Its options are its fields.

    A subclass with options is a dataclass (a frozen one is best), or has a constructor of its own
    that stores its arguments on the instance.

    **Before** :meth:`run`, the graph passes ``lint`` and is in topological order. Every node has
    its fake value: ``meta["example_value"]`` at stage ``torch``, ``meta["val"]`` at all other
    stages. The graph is composer's copy, and the pass may edit it. A pass must never change the
    captured graph, the user's module, or the values of weights.

    **After** :meth:`run`, the graph has the same placeholders in the same order. It has the same
    number of outputs, each with the same shape, dtype and device, and at ``torch`` and ``aten`` the
    same strides. It has no cycle. Every new operation can run on the fake values of its inputs.

    A pass need not sort new nodes or set their metadata. The pipeline sorts the nodes, and computes
    the fake values of changed nodes and of all nodes that depend on them. A pass that breaks a
    rule, or raises, is rolled back, and the error is recorded. Under ``on_pass_error="raise"``
    composer raises :class:`~composer.errors.PassError` instead.

    A pass keeps no state between runs and may run on several threads at once.
    """

    name: ClassVar[str] = ""
    """The recorded name. The default is the name of the class in snake case."""

    stage: ClassVar[Stage | str] = Stage.ATEN

    runs_last: ClassVar[bool] = False
    """True if the pass runs after the other passes of its stage. At ``joint`` and ``post_grad`` it
    then also runs after Inductor's own rewrites of that stage, and not before them."""

    eliminates_dead_code: ClassVar[bool] = True
    """True if composer removes unused operations after a run that changed the graph. Operations
    that write to their inputs, draw random numbers or change torch's state always stay."""

    keeps_numbers: ClassVar[bool] = False
    """True if the pass promises that the graph computes the same as before, up to rounding. Under
    the policy's ``verify`` composer compares the two graphs. A difference counts as a failure."""

    depends_on: ClassVar[tuple[str, ...]] = ()
    """Names of further modules whose source decides what the pass does. Their source is part of
    :meth:`uuid`."""

    _limit: ClassVar[MatchLimit | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            words = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"  # a word begins there
            cls.name = re.sub(words, "_", cls.__name__).lower()
        if isinstance(cls.__dict__.get("stage"), str):
            cls.stage = as_stage(cls.stage)

    @abstractmethod
    def run(self, gm: torch.fx.GraphModule) -> int | PassResult | None:
        """Rewrite ``gm`` in place.

        Returns:
            The number of places that were rewritten; ``None`` if the pass does not count them.
        """

    def for_graph(self, *, inference: bool) -> GraphPass:
        """Return the pass to run on one of AOTAutograd's graphs.

        Args:
            inference: True if the graph has no backward.
        """
        return self

    def limited(self, limit: MatchLimit) -> Self:
        """Return a copy of the pass that rewrites only as many places as ``limit`` allows."""
        twin = copy.copy(self)
        object.__setattr__(twin, "_limit", limit)
        return twin

    def uuid(self) -> str | None:
        """Return a SHA-256 that is equal in every process for the same pass, or ``None``.

        It covers the source file of the class, the modules in ``depends_on``, the attributes of the
        class, and the parameters of the instance. It is part of composer's ``graph_key`` and of the
        key of Inductor's caches. It is ``None`` if a parameter or an attribute has no text that is
        equal in every process. Inductor's caches are then bypassed.
        """
        modules = [source_of_module(name) for name in self.depends_on]
        source = source_of_class(type(self), GraphPass)
        held = members_of_class(type(self), GraphPass)
        try:
            return digest(self.name, str(self.stage), source, held, modules, self._parameters())
        except Unstable:
            return None

    def _parameters(self) -> dict[str, Any]:
        """Return the values on the instance that :meth:`uuid` covers: fields and other attributes.

        Cached properties are left out, since they follow from the other values.
        """
        parameters = values_of(self)
        for name, value in vars(self).items():
            member = getattr(type(self), name, None)
            if name != "_limit" and not isinstance(member, functools.cached_property):
                parameters[name] = value
        return parameters

    def chosen(self, places: Iterable[T]) -> Iterator[T]:
        """Yield the places to rewrite: all, or as many as :func:`composer.passes.bisect` allows.

        If a pass iterates over ``self.chosen(...)``, the bisection finds not only the pass but also
        the match that changed the numbers.
        """
        for place in places:
            if self._limit is not None and not self._limit.take():
                return
            yield place


class MatchLimit:
    """A limit on the number of matches that are rewritten; ``taken`` counts them.

    Args:
        most: The largest number of matches; by default there is no limit.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self.taken = 0

    def take(self) -> bool:
        """Count one more place and return true, or return false if the limit is reached."""
        if self.taken >= self._most:
            return False
        self.taken += 1
        return True


def as_stage(name: str, of_pass: str = "") -> Stage:
    """Return the stage of that name.

    Args:
        name: The stage.
        of_pass: The name of the pass, for the error message; empty if the traceback shows it.

    Raises:
        OptionError: There is no stage of that name.
    """
    try:
        return Stage(name)
    except ValueError:
        known = [stage.value for stage in Stage]
        guess = did_you_mean(str(name), known)
        whose = f"pass {of_pass!r}: " if of_pass else ""
        what = f"{whose}unknown stage {name!r}{guess} (accepted: {', '.join(known)})"
        raise OptionError(what) from None
