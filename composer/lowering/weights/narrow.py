"""Keeps copies of weights in bfloat16: made once, and again when a weight changes.

Rounding the weights within the graph would cost memory traffic at every call, as much as computing
in bfloat16 saves.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from composer import _torch
from composer.lowering.partition.regions import Region
from composer.lowering.weights.bindings import BindingEngine
from composer.lowering.weights.by_address import BoundWeights


class Copy:
    """A bfloat16 copy of a weight, and the state of the weight that it was made from.

    It does not keep the weight alive.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weakref.ref(weight)
        self._state = _state(weight)
        self._layout = _layout(weight)
        self.values = torch.nn.Parameter(narrowed(weight), requires_grad=False)

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
                self.values.copy_(weight.detach())
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
    """The bfloat16 copies of weights. A copy lives as long as an engine holds it.

    Graphs that share a weight share its copy, and so do the candidates for one graph.
    """

    def __init__(self) -> None:
        self._of: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()

    def of(self, weight: torch.Tensor) -> Copy:
        """Return the copy of a weight, with the weight's present values."""
        known = self._of.get(id(weight))
        if known is None or not known.follow(weight):
            known = self._of[id(weight)] = Copy(weight)
        return known


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """Return the values in bfloat16, as a tensor that is not a view and that has a version."""
    with _outside_of_modes():
        return weight.detach().to(torch.bfloat16)


@contextlib.contextmanager
def _outside_of_modes() -> Iterator[None]:
    with _torch.fakes.unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


class NarrowWeights(BindingEngine[dict[int, Copy]]):
    """Calls what was compiled for a graph that takes some of its weights in bfloat16.

    Args:
        compiled: The compiled graph. It takes the arguments, with the weights at ``places`` in
            bfloat16, and then the weights at ``more`` in bfloat16.
        region: The graph before the change, with the weights at all these positions.
        places: Positions of weights that the graph reads in bfloat16 only.
        more: Positions of weights that the graph reads both in bfloat16 and as they are.
        copies: The copies, shared with other graphs.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        region: Region,
        places: Sequence[int],
        more: Sequence[int],
        copies: Copies,
    ) -> None:
        super().__init__(region)
        # Rounding a weight after each change costs no more than rounding it at each call.
        self._changes_allowed = math.inf
        self._run = _torch.breaks.undisabled(compiled)
        self._places = tuple(places)
        self._more = tuple(more)
        self._copies = copies
        self.bind_first(region)

    def _make(self, values: Mapping[int, torch.Tensor]) -> dict[int, Copy]:
        return {i: self._copies.of(each) for i, each in values.items()}

    def __call__(self, *args: Any) -> Any:
        """Run with the weights as they are now."""
        copies = self._made_for(args)

        def at(i: int) -> torch.Tensor:
            return copies[i].values if i in copies else narrowed(args[i])

        inputs = list(args)
        for i in self._places:
            inputs[i] = at(i)
        inputs.extend(map(at, self._more))
        return self._run(*inputs)
