"""Weights bound into an engine by address, and the check that they are still the same.

:mod:`~composer.lowering.weights.watchable` says which weights may be bound.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from composer import _torch
from composer.lowering.weights import samples

_versions = operator.attrgetter("_version")


class _Watch(weakref.ref[torch.Tensor]):
    """A weak reference of composer's, as opposed to those of others."""

    __slots__ = ()


class WeightSet:
    """The weights of one of the modules that call an engine. It keeps no weight alive.

    Attributes:
        changes: By index, how often a weight was not what had been bound.
        calls: How many calls came before the set was bound.

    Args:
        tensors: The weights.
        witnesses: By index among the weights, another tensor that is written to whenever the weight
            is; for weights that torch writes to without raising their version.
        forget: Called with a reference to the first weight that dies or is swapped for another
            tensor. It has to let go of the set.
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


@dataclass(frozen=True, slots=True)
class Found:
    """The versions, by index, that weights had when some of their elements were found changed."""

    versions: Mapping[int, int]
    at: float = field(default_factory=time.monotonic)

    def is_settled(self) -> bool:
        """Whether a write that was under way then has raised the version by now."""
        return time.monotonic() >= self.at + samples.PATIENCE

    def untold(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether no version tells of the write to one of them."""
        return any(given[i]._version == version for i, version in self.versions.items())


class BoundWeights:
    """The weights of one set that an engine took by address, as they were then.

    A weight is the same while its identity, ``data_ptr`` and ``_version`` are:

    | change | seen by |
    |---|---|
    | an update in place, ``load_state_dict`` | the version |
    | ``p.data = new`` | the address |
    | a replaced parameter | the identity: another set of weights (:func:`identities`) |
    | ``p.data.mul_()``, a write through numpy | none of them; :func:`refresh` says so |

    :mod:`~composer.lowering.weights.samples` finds most changes of the last kind where
    :func:`refresh` was not called. Small buffers are compared by value.

    Memory that was freed may be given to new values, which then lie at the old address. So memory
    of the CPU is held until the weights are bound again or let go. Memory of a GPU is too scarce
    for that, since programs move models off it between calls; there it is watched.

    Args:
        tensors: Index among the weights of the set to the tensor bound there.
        witnesses: Those of the set.
        size: How many weights the set has.
        sampled: Whether to look at elements of them now and then.
        found: What the state before this one had found so.
    """

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        witnesses: Mapping[int, torch.Tensor],
        size: int,
        *,
        sampled: bool = False,
        found: Found | None = None,
    ) -> None:
        self._indices = tuple(tensors)
        self._pick = picker(self._indices) if len(tensors) < size else None
        self._versions = list(map(_versions, tensors.values()))
        self._expected: list[int] | None = self._versions
        self._addresses = list(map(torch.Tensor.data_ptr, tensors.values()))
        self._witnesses = {i: witnesses[i] for i in tensors if i in witnesses}
        self._distinct = tuple({id(each): each for each in self._witnesses.values()}.values())
        self._witnessed = list(map(_versions, self._distinct))
        self._held = [each.detach() for each in tensors.values() if each.device.type == "cpu"]
        elsewhere = {i: each for i, each in tensors.items() if each.device.type != "cpu"}
        self._gone = {i: _torch.tensors.memory_gone(each) for i, each in elsewhere.items()}
        self._samples = samples.Samples([*tensors.values()]) if sampled and tensors else None
        self.found = found
        """Weights of which elements changed, until it is known whether a version told."""
        if tensors:
            count_steps()
            _bound[id(self)] = self

    @property
    def expired(self) -> bool:
        """Whether :meth:`expire` was called."""
        return self._expected is None

    def expire(self) -> None:
        """Count as changed at the next look."""
        self._expected = None

    def unchanged(self, given: tuple[torch.Tensor, ...]) -> bool:
        """Whether every bound tensor of the set is at its address, in its version."""
        bound = given if self._pick is None else self._pick(given)
        if list(map(_versions, bound)) != self._expected:
            return False
        if list(map(torch.Tensor.data_ptr, bound)) != self._addresses:
            return False
        if self._distinct and list(map(_versions, self._distinct)) != self._witnessed:
            return False
        if self._gone and any(gone() for gone in self._gone.values()):
            return False
        if self._samples is None:
            return True
        if not self._samples.are_whole_unchanged():
            return False
        return not (self._samples.is_due() and self._differ(given))

    def _differ(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether elements of weights have changed; all engines then read their weights again."""
        assert self._samples is not None
        if self.found is not None and self.found.is_settled():
            if self.found.untold(given):
                samples.warn()
            self.found = None
        changed = [self._indices[i] for i in self._samples.changed(len(_bound))]
        if changed:
            self.found = Found({i: given[i]._version for i in changed})
            refresh()
        return bool(changed)

    def changed(self, given: Sequence[torch.Tensor]) -> frozenset[int]:
        """Indices of the weights that are not what was bound."""
        bound = zip(self._indices, self._versions, self._addresses, strict=True)
        moved = {i for i, v, a in bound if (given[i]._version, given[i].data_ptr()) != (v, a)}
        witnesses = zip(self._distinct, self._witnessed, strict=True)
        written = {id(each) for each, version in witnesses if each._version != version}
        moved |= {i for i, witness in self._witnesses.items() if id(witness) in written}
        if self._samples is not None:  # memory that moved is not read: it may be gone
            still = (n for n, i in enumerate(self._indices) if i not in moved)
            moved |= {self._indices[n] for n in still if self._samples.is_whole_changed(n)}
        return frozenset(moved | {i for i, gone in self._gone.items() if gone()})


_bound: weakref.WeakValueDictionary[int, BoundWeights] = weakref.WeakValueDictionary()
"""All that is bound in this process, by identity, for as long as its engines live.

Other threads may add to it at any time: ``valuerefs`` copies it in one step.
"""


def refresh() -> None:
    """Have every engine read its weights again at its next call.

    For weights that were changed behind torch's back, where no version tells: by ``p.data.mul_()``,
    through numpy or DLPack, by a collective (``dist.broadcast``, ``dist.all_reduce``), or through
    the storage (``p.untyped_storage().copy_()``); docs/reference/engines/weights.md lists what is
    seen. That goes for what Inductor has frozen, too.
    """
    for reference in _bound.valuerefs():
        bound = reference()
        if bound is not None:
            bound.expire()


def picker(positions: tuple[int, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """``itemgetter`` of a tuple's items that gives a tuple for any number of positions.

    Consecutive positions are taken as a slice: for 200 items that takes a fifth of the time.
    """
    first = positions[0] if positions else 0
    end = first + len(positions)
    if positions == tuple(range(first, end)):
        return operator.itemgetter(slice(first, end))
    return operator.itemgetter(*positions)


def identities(given: tuple[Any, ...]) -> Hashable:
    """The identities of some tensors, good for as long as they live.

    A tuple of the tensors themselves would keep them alive. CPython's tuple has their identities
    side by side, behind its header: those bytes take a ninth of the time of ``map(id, given)`` for
    200 weights (0.8 of 7.0 us, looked up).
    """
    return _pointers(given) if _IN_A_ROW else tuple(map(id, given))


_HEADER = tuple.__basicsize__
_POINTER = ctypes.sizeof(ctypes.c_void_p)


def _pointers(items: tuple[Any, ...]) -> bytes:
    return ctypes.string_at(id(items) + _HEADER, len(items) * _POINTER)


def _in_a_row() -> bool:
    """Whether this interpreter's tuples and identities are those of CPython."""
    if sys.implementation.name != "cpython":
        return False
    items = (object(), None, ())
    expected = b"".join(id(each).to_bytes(_POINTER, sys.byteorder) for each in items)
    return _pointers(items) == expected


_IN_A_ROW = _in_a_row()


@functools.cache
def forget_swapped() -> None:
    """Have the sets of a weight forgotten before torch swaps it for another tensor.

    Torch refuses to while there are weak references to it.
    """
    _torch.tensors.before_swaps(_let_go)


def _let_go(weight: torch.Tensor) -> None:
    for each in weakref.getweakrefs(weight):
        if isinstance(each, _Watch) and each.__callback__ is not None:
            each.__callback__(each)


@functools.cache
def count_steps() -> None:
    """Have the steps of optimizers raise the versions of the parameters that they wrote to.

    Two kinds of torch's do not (2.13): the fused kernels (``AdamW(..., fused=True)`` and kin), and
    the collectives by which ``ZeroRedundancyOptimizer`` gets the parameters that other ranks
    updated; the day they do, ``tests/lowering/test_weights.py`` says so. Kernels of other packages
    write to addresses that they are given (DeepSpeed's, apex's).
    """
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Dynamo traces it where a step is compiled: of a plain one it must not break the graph."""
    receives = foreign = False
    if not torch.compiler.is_compiling():
        receives = _torch.tensors.receives_parameters(optimizer)
        foreign = not str(type(optimizer).step.__module__).startswith("torch.optim.")
    for group in optimizer.param_groups:
        if receives or foreign or group.get("fused"):
            _raise_versions([p for p in group["params"] if receives or p.grad is not None])


def _increment(parameters: list[torch.Tensor]) -> None:
    increment_version(parameters)


_raise_versions = _torch.breaks.disabled(_increment, "versions mean nothing in a functional graph")
