"""Binds weights into an engine by address, and checks that they have not changed.

:mod:`~composer.lowering.weights.watchable` says which weights may be bound.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
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
from composer.errors import WeightsWarning
from composer.lowering.weights import samples
from composer.system.warned import warn_once

_versions = operator.attrgetter("_version")

_FOUND = (
    "weights were written to through .data, numpy or a collective, which raises no version; a few "
    "of their elements told composer. Its engines read the weights again, and these weights are "
    "inputs of every call from now on. Call composer.refresh() after such writes: a write to few "
    "elements is not found"
)

PATIENCE = 1.0
"""Seconds after which a write that raises the version must have raised it."""


class _Watch(weakref.ref[torch.Tensor]):
    """A weak reference that composer made, as opposed to those of other packages."""

    __slots__ = ()


class WeightSet:
    """The weights of one of the modules that call an engine. It keeps no weight alive.

    Attributes:
        changes: By index, how often a weight differed from what had been bound.
        calls: Number of calls before the set was bound.
        found: A write that no version tells of. The set is not bound any more, since the program
            may write so again at any time.

    Args:
        tensors: The weights.
        witnesses: By index among the weights, another tensor that is written to whenever the weight
            is. Needed for weights that torch writes to without raising their version.
        forget: Called with a reference to the first weight that dies or is swapped for another
            tensor. It has to drop the set.
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
        self.found: Found | None = None
        self._watch = tuple(_Watch(each, forget) for each in tensors)
        if tensors:
            forget_swapped()


@dataclass(frozen=True, slots=True)
class Found:
    """Weights found changed by their elements: the version of each at that time, by index.

    Torch raises the version after a write. So while another thread is writing, the elements differ
    before the version does.
    """

    versions: Mapping[int, int]
    at: float = field(default_factory=time.monotonic)

    def is_settled(self) -> bool:
        """True if a write that was under way then must have raised the version by now."""
        return time.monotonic() >= self.at + PATIENCE

    def has_unraised_version(self, weights: Sequence[torch.Tensor]) -> bool:
        """True if one of the weights still has the same version: the write did not raise it."""
        return any(weights[i]._version == version for i, version in self.versions.items())


class BoundWeights:
    """The state of a set's weights at the time when an engine took them by address.

    A weight counts as unchanged while its identity, ``data_ptr`` and ``_version`` are the same:

    | change | seen by |
    |---|---|
    | an update in place, ``load_state_dict`` | the version |
    | ``p.data = new`` | the address |
    | a replaced parameter | the identity: another set of weights (:func:`identities`) |
    | ``p.data.mul_()``, a write through numpy | none of these: call :func:`refresh` |

    :mod:`~composer.lowering.weights.samples` finds most changes of the last kind at the next call.
    The weights of the set are then inputs, unless a version is raised after all. Small buffers are
    compared by value.

    Memory that was freed may be reused for new values, which then lie at the old address. So CPU
    memory is held until the weights are bound again or dropped. GPU memory is too scarce for that,
    since programs move models off the GPU between calls. There composer watches for its release.

    Args:
        tensors: The bound tensors, by index among the weights of the set.
        members: The set. Without one there are no witnesses.
    """

    def __init__(
        self, tensors: Mapping[int, torch.Tensor], members: WeightSet | None = None
    ) -> None:
        self._pick = picker(tuple(tensors))
        versions = list(map(_versions, tensors.values()))
        self._addresses = list(map(torch.Tensor.data_ptr, tensors.values()))
        self._states = dict(zip(tensors, zip(versions, self._addresses, strict=True), strict=True))
        witnesses = {} if members is None else members.witnesses
        self._witnesses = {i: witnesses[i] for i in tensors.keys() & witnesses.keys()}
        self._witness_versions = {each: each._version for each in self._witnesses.values()}
        self._distinct = tuple(self._witness_versions)
        self._expected: list[int] | None = [*versions, *self._witness_versions.values()]
        self._held: list[torch.Tensor] = []
        self._gone: dict[int, Callable[[], bool]] = {}
        for i, weight in tensors.items():
            if weight.device.type == "cpu":
                self._held.append(weight.detach())
            else:
                self._gone[i] = _torch.tensors.memory_gone(weight)
        self._members = members
        self._samples = samples.Samples(tensors)
        if tensors:
            count_steps()
            _bound[id(self)] = self

    @property
    def expired(self) -> bool:
        """True if :meth:`expire` was called."""
        return self._expected is None

    def expire(self) -> None:
        """Make :meth:`unchanged` return False from now on."""
        self._expected = None

    def unchanged(self, weights: tuple[torch.Tensor, ...]) -> bool:
        """True if no change of a bound tensor is seen."""
        bound = self._pick(weights)
        if list(map(_versions, bound + self._distinct)) != self._expected:
            return False
        if list(map(torch.Tensor.data_ptr, bound)) != self._addresses:
            return False
        for gone in self._gone.values():
            if gone():
                return False
        if not self._samples.are_whole_unchanged():
            return False
        if self._samples.show_a_write():
            self._find(weights)
            return False
        found = None if self._members is None else self._members.found
        return found is None or not found.is_settled() or self._settle(found, weights)

    def _find(self, weights: Sequence[torch.Tensor]) -> None:
        """Have all engines read their weights again, and this set become inputs."""
        if self._members is None:
            return
        changed = self._samples.changed()
        self._members.found = Found({i: weights[i]._version for i in changed})
        refresh()

    def _settle(self, found: Found, weights: Sequence[torch.Tensor]) -> bool:
        """Return False if the write raised the version after all: the set is to be bound again."""
        if self._members is not None:
            is_unseen = found.has_unraised_version(weights)
            self._members.found = dataclasses.replace(found, at=math.inf) if is_unseen else None
            if is_unseen:
                warn_once(WeightsWarning(_FOUND))
                return True
        self.expire()
        return False

    def changed(self, weights: Sequence[torch.Tensor]) -> frozenset[int]:
        """Return the indices of the weights that differ from what was bound."""
        return frozenset(i for i in self._states if self._is_changed(i, weights[i]))

    def _is_changed(self, i: int, weight: torch.Tensor) -> bool:
        if (weight._version, weight.data_ptr()) != self._states[i]:
            return True
        witness = self._witnesses.get(i)
        if witness is not None and witness._version != self._witness_versions[witness]:
            return True
        if i in self._gone:
            return self._gone[i]()
        # Elements are read last: the memory of a weight that moved may be gone.
        return self._samples.is_whole_changed(i)


_bound: weakref.WeakValueDictionary[int, BoundWeights] = weakref.WeakValueDictionary()
"""All states of bound weights in this process, by identity, while their engines live.

Other threads may add to it at any time: ``valuerefs`` copies it in one step.
"""


def refresh() -> None:
    """Have every engine read its weights again at its next call.

    Call it after writes to weights that do not raise a version: by ``p.data.mul_()``, through numpy
    or DLPack, by a collective (``dist.broadcast``, ``dist.all_reduce``), or through the storage
    (``p.untyped_storage().copy_()``). docs/reference/engines/weights.md lists which writes are
    seen. The call also refreshes weights that Inductor has frozen.
    """
    for reference in _bound.valuerefs():
        bound = reference()
        if bound is not None:
            bound.expire()


def picker(positions: tuple[int, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks these items of a tuple, as a tuple.

    Consecutive positions are taken as a slice: for 200 items that takes a fifth of the time.
    """
    first = positions[0] if positions else 0
    end = first + len(positions)
    if positions == tuple(range(first, end)):
        return operator.itemgetter(slice(first, end))
    return operator.itemgetter(*positions)


def identities(items: tuple[Any, ...]) -> Hashable:
    """Return a key made of the identities of some tensors, valid while the tensors live.

    A tuple of the tensors themselves would keep them alive. A tuple of CPython holds the identities
    of its items in a row, after its header. Copying these bytes takes a ninth of the time of
    ``map(id, items)``: 0.8 us instead of 7.0 us for 200 weights, with the look-up.
    """
    return _pointers(items) if _IN_A_ROW else tuple(map(id, items))


_HEADER = tuple.__basicsize__
_POINTER = ctypes.sizeof(ctypes.c_void_p)


def _pointers(items: tuple[Any, ...]) -> bytes:
    return ctypes.string_at(id(items) + _HEADER, len(items) * _POINTER)


def _in_a_row() -> bool:
    """True if this interpreter's tuples hold the identities of their items, as in CPython."""
    if sys.implementation.name != "cpython":
        return False
    items = (object(), None, ())
    expected = b"".join(id(each).to_bytes(_POINTER, sys.byteorder) for each in items)
    return _pointers(items) == expected


_IN_A_ROW = _in_a_row()


@functools.cache
def forget_swapped() -> None:
    """Forget the sets of a weight before torch swaps the weight for another tensor.

    Torch refuses to swap a tensor while there are weak references to it.
    """
    _torch.tensors.before_swaps(_let_go)


def _let_go(weight: torch.Tensor) -> None:
    for reference in weakref.getweakrefs(weight):
        if isinstance(reference, _Watch):
            reference.__callback__(reference)


@functools.cache
def count_steps() -> None:
    """Have the steps of optimizers raise the versions of the parameters that they wrote to.

    In torch 2.13 two kinds of steps do not raise them: fused kernels (such as
    ``AdamW(..., fused=True)``), and the collectives by which ``ZeroRedundancyOptimizer`` receives
    the parameters that other ranks updated. ``tests/lowering/test_weights.py`` fails when torch
    changes this. Kernels of other packages (DeepSpeed, apex) write to raw addresses.
    """
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise the versions after one step.

    Dynamo traces this function where a step is compiled. For an optimizer of torch that is not
    fused, it must not break the graph.
    """
    receives = foreign = False
    # ``is_compiling`` is true in all threads while any thread compiles. This is true in a trace.
    if not torch.compiler.is_dynamo_compiling():
        receives = _torch.tensors.receives_parameters(optimizer)
        foreign = not str(type(optimizer).step.__module__).startswith("torch.optim.")
    for group in optimizer.param_groups:
        if receives:
            _raise_versions(group["params"])
        elif foreign or group.get("fused"):
            _raise_versions([each for each in group["params"] if each.grad is not None])


def _increment(parameters: list[torch.Tensor]) -> None:
    increment_version(parameters)


_raise_versions = _torch.breaks.disabled(_increment, "versions mean nothing in a functional graph")
