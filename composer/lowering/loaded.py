"""A region that an engine has loaded, once for each set of weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from composer.build import BuildFacts
from composer.lowering.partition.regions import Region
from composer.lowering.weights.bindings import BindingEngine

_TRIES = 4
"""Most loads for one call: each may meet a call of another thread that widens a range."""

Run = Callable[[tuple[Any, ...]], Sequence[Any]]
"""Takes the arguments of a region, weights included, and returns its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The model of a region, loaded into an engine with a set of weights.

    Attributes:
        run: Takes the region's arguments as a tuple, weights included: tensors, which may be
            non-contiguous, and Python integers. It returns the model's outputs in the model's order
            as row-major tensors, an integer as an int64 tensor without dimensions. They share no
            memory with an argument. Several threads may call it. It may raise :class:`LoadAgain`.
        facts: What the record says of it.
        sums: Further facts, which are added up over the regions of a build: numbers, lists, or
            numbers by name.
        keeps: The engine's own object, and what has to live as long as it, such as weights that it
            reads.
        renews_cheaply: True if a load with other weights takes little time. composer then takes in
            even weights that change often.
    """

    run: Run
    facts: BuildFacts = field(default_factory=BuildFacts)
    sums: Mapping[str, Any] = field(default_factory=dict)
    keeps: Sequence[Any] = ()
    renews_cheaply: bool = False


class LoadAgain(Exception):
    """Raised by :attr:`Loaded.run`: composer loads the model again, and repeats the call."""


class BoundRegion(BindingEngine[Loaded]):
    """A region that an engine runs, with its weights taken in. Several threads may call it.

    Args:
        region: The region, with the weights to take in by address and their witnesses.
        load: Loads the region with these values taken in, by argument position.
    """

    def __init__(
        self, region: Region, load: Callable[[Mapping[int, torch.Tensor]], Loaded]
    ) -> None:
        super().__init__(region)
        self._load = load
        first = self.bind_first(region)
        self.facts = first.facts
        """The facts of the region with its own weights."""
        self.sums = first.sums
        """Its facts that are added up over the regions of a build."""
        if first.renews_cheaply:
            self._changes_allowed = math.inf

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the region on its arguments. After :class:`LoadAgain` it is loaded once more."""
        loaded = self._made_for(args)
        try:
            return loaded.run(args)
        except LoadAgain:
            return self._loaded_again(args, loaded)

    def _loaded_again(self, args: tuple[Any, ...], loaded: Loaded) -> Sequence[Any]:
        """Load the region anew and run it; again if a call of another thread came in between."""
        for _ in range(_TRIES):
            with self._lock:
                self._drop_all(loaded)
            loaded = self._made_for(args)
            with contextlib.suppress(LoadAgain):
                return loaded.run(args)
        raise RuntimeError(f"the engine asked to be loaded again {_TRIES} times for one call")

    def _make(self, values: Mapping[int, torch.Tensor]) -> Loaded:
        return self._load(values)
