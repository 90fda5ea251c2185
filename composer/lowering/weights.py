"""Weights bound into an engine by address, and the check that they are still the same."""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from composer import _torch

_versions = operator.attrgetter("_version")


def can_bind(value: Any) -> bool:
    """Whether a change of this tensor could be seen, and its memory shared.

    Inference tensors have no version counter; subclasses and sparse tensors have no one address.
    Other processes write to memory that they share with this one, as the learner of a model does
    whose actors run it, and raise no version here. Of memory on a GPU torch cannot tell. Nor does a
    write to a vector of all parameters raise the versions of those that are parts of its memory
    (``torch.nn.utils.vector_to_parameters``).
    """
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout is torch.strided
        and not value.is_inference()
        and value.numel() > 0
        and value.untyped_storage().nbytes() <= value.nbytes
        and not (value.device.type == "cpu" and value.untyped_storage().is_shared())
    )


class _Watch(weakref.ref[torch.Tensor]):
    """A weak reference of ours, to be told from those of others."""

    __slots__ = ()


class WeightSet:
    """The weights of one module among those that call an engine; keeps none of them alive.

    ``witnesses`` map an index among the weights to another tensor that is written to whenever the
    weight is, for those that torch writes to without raising their version. ``changes`` count by
    index how often a weight was not what had been bound, ``calls`` those before it was bound.

    Args:
        tensors: The weights.
        witnesses: As above.
        forget: What to do when the first weight dies, or is swapped for another tensor; called
            with its reference. It has to let go of the set.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        witnesses: Mapping[int, torch.Tensor],
        forget: Callable[[Any], None],
    ) -> None:
        self.witnesses = witnesses
        self.changes: Counter[int] = Counter()
        self.calls = 0
        self._watch = tuple(_Watch(each, forget) for each in tensors)
        if tensors:
            forget_swapped()


class BoundWeights:
    """The state of the tensors that an engine took by address, of those of one set.

    A weight is the same while its identity, ``data_ptr`` and ``_version`` are: an in-place update
    raises the version, ``load_state_dict`` too, ``p.data = new`` keeps it and moves the address, a
    replaced parameter is another object and makes another set (:func:`identities`).
    ``p.data.mul_()`` and writes through numpy keep all three and cannot be seen: :func:`refresh`
    is for them.

    Args:
        tensors: Index among the weights of the set to the tensor bound there.
        witnesses: Those of the set.
        size: How many weights the set has.
        holds_memory: Whether what was made of the weights holds their memory. Where it does not,
            other values may come to lie at the same address, and the memory is watched, too.
    """

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        witnesses: Mapping[int, torch.Tensor],
        size: int,
        *,
        holds_memory: bool = True,
    ) -> None:
        self._indices = tuple(tensors)
        self._pick = picker(self._indices) if len(tensors) < size else None
        self._versions = list(map(_versions, tensors.values()))
        self._expected: list[int] | None = self._versions
        self._addresses = list(map(torch.Tensor.data_ptr, tensors.values()))
        self._witnesses = {i: witnesses[i] for i in tensors if i in witnesses}
        self._distinct = tuple({id(each): each for each in self._witnesses.values()}.values())
        self._witnessed = list(map(_versions, self._distinct))
        watched = () if holds_memory else tensors.values()
        self._gone = tuple(map(_torch.memory_gone, watched))
        if tensors:
            count_steps()
            _bound.add(self)

    @property
    def expired(self) -> bool:
        """Whether somebody said that the weights are not what was bound."""
        return self._expected is None

    def expire(self) -> None:
        """Be taken for changed at the next look."""
        self._expected = None

    def unchanged(self, given: tuple[torch.Tensor, ...]) -> bool:
        """Whether every bound tensor of the set is at its address, in its version."""
        if self._pick is not None:
            given = self._pick(given)
        return (
            list(map(_versions, given)) == self._expected
            and list(map(torch.Tensor.data_ptr, given)) == self._addresses
            and (not self._distinct or list(map(_versions, self._distinct)) == self._witnessed)
            and not (self._gone and any(gone() for gone in self._gone))
        )

    def changed(self, given: Sequence[torch.Tensor]) -> frozenset[int]:
        """Indices of the weights that are not what was bound."""
        bound = zip(self._indices, self._versions, self._addresses, strict=True)
        moved = {i for i, v, a in bound if (given[i]._version, given[i].data_ptr()) != (v, a)}
        seen = zip(self._distinct, self._witnessed, strict=True)
        written = {id(each) for each, version in seen if each._version != version}
        moved |= {i for i, w in self._witnesses.items() if id(w) in written}
        memory = zip(self._indices, self._gone, strict=False)  # all of it is watched, or none
        return frozenset(moved | {i for i, gone in memory if gone()})


_bound: weakref.WeakSet[BoundWeights] = weakref.WeakSet()
"""All that is bound in this process, for as long as its engines live."""


def refresh() -> None:
    """Have every engine read its weights again at its next call.

    For weights that were changed behind torch's back, where no version tells: by ``p.data.mul_()``,
    or through numpy or DLPack. All other changes are seen without it. That goes for what Inductor
    has frozen, too.
    """
    for each in tuple(_bound):
        each.expire()


def picker(positions: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """``itemgetter`` that gives a new tuple for any number of positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    if positions:
        (position,) = positions
        return lambda args: (args[position],)
    return lambda args: ()


def identities(given: tuple[Any, ...]) -> Hashable:
    """The identities of some tensors, good for as long as they live.

    Comparing with a tuple of the tensors themselves is faster, but would keep them alive.
    """
    return tuple(map(id, given))


@functools.cache
def forget_swapped() -> None:
    """Have the sets of a weight forgotten before torch swaps it for another tensor.

    Torch refuses to while there are weak references to it.
    """
    _torch.before_swaps(_let_go)


def _let_go(weight: torch.Tensor) -> None:
    for each in weakref.getweakrefs(weight):
        if isinstance(each, _Watch) and each.__callback__ is not None:
            each.__callback__(each)


@functools.cache
def count_steps() -> None:
    """Have the steps of optimizers raise the versions of the parameters that they wrote to.

    Two kinds do not (torch 2.13): the fused kernels (``AdamW(..., fused=True)`` and kin), and the
    collectives by which ``ZeroRedundancyOptimizer`` gets the parameters that other ranks updated.
    The day they do, ``tests/test_weights.py`` says so and this hook can go.
    """
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Dynamo traces it where a step is compiled: of a plain one it must not break the graph."""
    receives = not torch.compiler.is_compiling() and _torch.receives_parameters(optimizer)
    for group in optimizer.param_groups:
        if receives or group.get("fused"):
            _raise_versions([p for p in group["params"] if receives or p.grad is not None])


@_torch.disabled
def _raise_versions(parameters: list[torch.Tensor]) -> None:
    """Not traced: in a graph that is made functional, a version means nothing."""
    increment_version(parameters)
