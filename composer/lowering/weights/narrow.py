"""Weights in bfloat16 beside the model's own: made once, and anew when a weight changes.

To round the weights within the graph would cost, at every call, the memory traffic that computing
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
    """What a weight is in bfloat16, as of a certain state of it; does not keep the weight alive."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weakref.ref(weight)
        self._state = _state(weight)
        self._layout = _layout(weight)
        self.values = torch.nn.Parameter(narrowed(weight), requires_grad=False)

    def follow(self, weight: torch.Tensor) -> bool:
        """Have the values of this weight, as it is now; false if it is another one.

        They are written where they were, which raises the version of ``values``. An engine that
        takes copies in as constants sees one weight that keeps changing, not ever new ones. A call
        that runs meanwhile in another thread may read both, as in eager one does while a weight is
        updated in place.
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
    """To be read before the values are: a write while they are taken is seen then."""
    return BoundWeights({0: weight}, {}, 1)


def _layout(weight: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """How memory is read: ``p.data = p.data.t()`` changes neither its address nor a version."""
    return weight.shape, weight.stride()


class Copies:
    """The weights that engines read in bfloat16, each as long as an engine holds it.

    Graphs that share a weight, and the candidates for one graph, share its copy.
    """

    def __init__(self) -> None:
        self._of: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()

    def of(self, weight: torch.Tensor) -> Copy:
        """The weight in bfloat16, as it is now."""
        known = self._of.get(id(weight))
        if known is None or not known.follow(weight):
            known = self._of[id(weight)] = Copy(weight)
        return known


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """A tensor of the values in bfloat16 that is nobody's view, and that has a version."""
    with _outside_of_modes():
        return weight.detach().to(torch.bfloat16)


@contextlib.contextmanager
def _outside_of_modes() -> Iterator[None]:
    with _torch.fakes.unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


class NarrowWeights(BindingEngine[dict[int, Copy]]):
    """Calls what was compiled for a graph that takes some of its weights in bfloat16.

    Args:
        compiled: Takes the arguments with the weights at ``places`` rounded, then ``more``.
        region: The graph as it was, and the weights at all these positions.
        places: Of weights that are read in bfloat16 only.
        more: Of weights that are read as they are as well; rounded, they follow the arguments.
        copies: Where other graphs find the rounded weights.
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
        self._changes_allowed = math.inf  # to round one anew costs no more than at each call
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

        given = list(args)
        for i in self._places:
            given[i] = at(i)
        given.extend(map(at, self._more))
        return self._run(*given)
