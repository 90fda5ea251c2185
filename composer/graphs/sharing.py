"""Inputs that a graph writes to and that share memory with other inputs: no engine serves these.

AOTAutograd of torch 2.11 to 2.15 merges the inputs that overlap in the first call into one. If an
output is a view of one of them, it then fails, or returns another part of the memory. The input is
already written to at that time (https://github.com/pytorch/pytorch/issues/198095). If inputs
overlap in a later call only, no guard detects it, and the results are wrong
(https://github.com/pytorch/pytorch/issues/139789). Eager is right in all these cases.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from composer import _torch
from composer.errors import SharedInputs
from composer.graphs import writes
from composer.records import GraphRequest, Reason, Status

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WHAT = "an input that is written to shares memory with another, which torch does not compile"


def decline_shared(request: GraphRequest) -> None:
    """Refuse a graph that writes to an input which shares memory with another in the first call.

    Raises:
        SharedInputs: If the graph does so.
    """
    written, tensors = writes.assigned_inputs(request.gm), _plain_inputs(request)
    if not written.isdisjoint(tensors) and _are_shared(tensors, written):
        _raise_shared()


def _raise_shared(*_: Any) -> Any:
    raise SharedInputs(Status.DECLINED, Reason.MUTATED_INPUTS, _WHAT)


def watched(
    run: Callable[..., Any], request: GraphRequest, otherwise: Callable[..., Any] = _raise_shared
) -> Callable[..., Any]:
    """A callable that uses ``otherwise`` for calls in which a written input shares memory.

    Such an input may be a view of a weight, too. Writes to weights are not checked. If the graph
    writes to no other inputs, ``run`` itself is returned.

    Args:
        run: The engine's callable.
        request: The graph.
        otherwise: Answers the calls with shared memory; the default raises ``SharedInputs``.
    """
    plain = _plain_inputs(request)
    positions = plain.keys() - request.weights
    written = writes.assigned_inputs(request.gm) & positions
    if not written or len(plain) < 2:
        return run
    run = _torch.breaks.undisabled(run)
    weights = _Weights(tuple(sorted(plain.keys() & request.weights)))

    def unless_shared(*args: Any) -> Any:
        near = weights.near(args, written)
        tensors = {i: args[i] for i in (*positions, *near)}
        return (otherwise if _are_shared(tensors, written) else run)(*args)

    return unless_shared


class _Weights:
    """Where the weights of a graph lie, so that a call need not look at each of hundreds.

    Attributes:
        positions: Their positions among the inputs.
    """

    def __init__(self, positions: tuple[int, ...]) -> None:
        self.positions = positions
        self._known: tuple[list[int], list[_Area]] = [], []

    def near(self, args: Sequence[Any], written: Iterable[int]) -> list[int]:
        """Return the positions of weights whose addresses meet those of a written input."""
        weights = [args[i] for i in self.positions]
        addresses, areas = self._known
        found = list(map(torch.Tensor.data_ptr, weights))
        if found != addresses:
            areas = _areas({i: args[i] for i in self.positions})
            self._known = found, areas
        return [i for each in written for i in _met(areas, *_span(args[each]))]


class _Area(NamedTuple):
    """A range of addresses, and the positions of the tensors that it is made of."""

    first: int
    end: int
    positions: tuple[int, ...]


def _areas(tensors: Mapping[int, torch.Tensor]) -> list[_Area]:
    """Return areas that do not meet, in their order. All tensors of one meet another of it."""
    areas: list[_Area] = []
    for first, end, i in sorted((*_span(each), i) for i, each in tensors.items()):
        if areas and first < areas[-1].end:
            last = areas.pop()
            areas.append(_Area(last.first, max(last.end, end), (*last.positions, i)))
        else:
            areas.append(_Area(first, end, (i,)))
    return areas


def _met(areas: Sequence[_Area], first: int, end: int) -> Iterator[int]:
    """Yield the positions of the tensors in areas that meet a range."""
    place = bisect.bisect_left(areas, end, key=attrgetter("first"))
    while place and areas[place - 1].end > first:
        place -= 1
        yield from areas[place].positions


def _plain_inputs(request: GraphRequest) -> dict[int, torch.Tensor]:
    inputs = enumerate(request.example_inputs)
    plain = {i: each for i, each in inputs if type(each) in _PLAIN}
    return {i: each for i, each in plain.items() if each.layout is torch.strided}


def _are_shared(tensors: Mapping[int, torch.Tensor], written: frozenset[int]) -> bool:
    """True if a tensor that is written to shares an element with another tensor.

    In most cases a comparison of address ranges is enough. If ranges overlap, torch checks the
    elements: two tensors may be alternate rows or columns of one.
    """
    near = overlapping(tensors)
    if near.isdisjoint(written):
        return False
    storages = defaultdict[int, list[int]](list)
    for i in near:
        storages[_torch.tensors.storage_id(tensors[i])].append(i)
    shared = set[int]()
    for group in storages.values():
        sizes = {tensors[i].itemsize for i in group}
        # Each tensor over an array of numpy has a storage of its own. Torch can compare the
        # elements of tensors only where all are of one size.
        if len(group) == 1 or len(sizes) > 1:
            shared.update(group)
        places = _torch.tensors.overlapping([tensors[i] for i in group])
        shared.update(group[place] for place in places)
    return not written.isdisjoint(shared)


def overlapping(tensors: Mapping[int, torch.Tensor]) -> set[int]:
    """The positions of the tensors whose address ranges overlap with that of another tensor."""
    return {i for area in _areas(tensors) if len(area.positions) > 1 for i in area.positions}


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    return first, first + _torch.tensors.reach(tensor) * tensor.itemsize
