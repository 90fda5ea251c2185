"""Keeps what is computed from weights ahead: made once, and again when a weight changes.

Rounding the weights within the graph would cost memory traffic at every call, as much as computing
in low precision saves.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from composer import _torch
from composer.lowering.partition.regions import Region
from composer.lowering.weights.bindings import BindingEngine
from composer.lowering.weights.by_address import BoundWeights
from composer.passes.ahead import How

Key = tuple[int, How]
"""The position of a weight, and what is computed from it."""


class Copy:
    """What is computed from a weight, and the state of the weight that it was made from.

    It does not keep the weight alive.
    """

    def __init__(self, weight: torch.Tensor, how: How) -> None:
        self._weight = weakref.ref(weight)
        self._how = how
        self._state = _state(weight)
        self._layout = _layout(weight)
        self.values = torch.nn.Parameter(computed(weight, how), requires_grad=False)

    def follow(self, weight: torch.Tensor) -> bool:
        """Update the copy to the weight's present values; False if it is no copy of this weight.

        The new values are written in place, which raises the version of ``values``. An engine that
        takes copies in as constants then sees one weight that changes, not a new weight each time.
        A call that runs at the same time in another thread may read old and new values. The same
        happens in eager mode while a weight is updated in place.
        """
        if self._weight() is not weight or self._layout != _layout(weight):
            return False
        if not self._state.unchanged((weight,)):
            state = _state(weight)
            with _outside_of_modes():
                self.values.copy_(self._how(weight.detach()))
            self._state = state
        return True


def _state(weight: torch.Tensor) -> BoundWeights:
    """Return the state of a weight.

    Call it before the values are read: a write while they are read is then seen.
    """
    return BoundWeights({0: weight})


def _layout(weight: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Return shape and strides: ``p.data = p.data.t()`` changes neither address nor version."""
    return weight.shape, weight.stride()


class Copies:
    """The copies of weights. A copy lives as long as an engine holds it.

    Graphs that share a weight share its copies, and so do the candidates for one graph.
    """

    def __init__(self) -> None:
        self._of = weakref.WeakValueDictionary[tuple[int, How], Copy]()  # by the weight's identity

    def of(self, weight: torch.Tensor, how: How) -> Copy:
        """Return the copy of a weight, made of the weight's present values."""
        key = id(weight), how
        known = self._of.get(key)
        if known is None or not known.follow(weight):
            known = self._of[key] = Copy(weight, how)
        return known


def computed(weight: torch.Tensor, how: How) -> torch.Tensor:
    """Return what is computed from a weight, as a tensor that is no view and that has a version."""
    with _outside_of_modes():
        return how(weight.detach())


@contextlib.contextmanager
def _outside_of_modes() -> Iterator[None]:
    with _torch.fakes.unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


class NarrowWeights(BindingEngine[dict[Key, Copy]]):
    """Calls what was compiled for a graph that takes copies of some of its weights.

    Args:
        compiled: The compiled graph. It takes the arguments, and behind them further copies.
        region: The graph before the change, with the weights of which it takes copies.
        takes: The copies that it takes, by their position. One behind the arguments is added.
        copies: The copies, shared with other graphs.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        region: Region,
        takes: Mapping[int, Key],
        copies: Copies,
    ) -> None:
        super().__init__(region)
        # Making a copy after each change costs no more than making it at each call.
        self._changes_allowed = math.inf
        self._run = _torch.breaks.undisabled(compiled)
        self._takes = dict(takes)
        self._copies = copies
        self.bind_first(region)

    def _make(self, values: Mapping[int, torch.Tensor]) -> dict[Key, Copy]:
        keys = [(i, how) for i, how in self._takes.values() if i in values]
        return {(i, how): self._copies.of(values[i], how) for i, how in keys}

    def __call__(self, *args: Any) -> Any:
        """Run with the weights as they are now."""
        copies = self._made_for(args)
        inputs = list(args)
        for position, key in self._takes.items():
            i, how = key
            values = copies[key].values if key in copies else computed(args[i], how)
            inputs[position : position + 1] = [values]  # at the end, this appends
        return self._run(*inputs)
