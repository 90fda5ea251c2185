"""Base class of engines that take weights in: they make one object for each set of weights.

Dynamo may give one engine the weights of several modules in turn, since it compiles their common
code once. The engine makes an object, such as a session, for each such set of weights. It keeps the
object while the set lives, and makes it again when a weight changes.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from composer.lowering.partition.regions import Region
from composer.lowering.weights.by_address import BoundWeights, WeightSet, identities, picker
from composer.lowering.weights.statistics import find_witnesses
from composer.lowering.weights.watchable import watchable
from composer.system import forks

T = TypeVar("T")

_RESTLESS = 2
"""After this many changes a weight is passed as an input at every call, and not taken in.

After this many sets of weights died, a new set is taken in only if it comes back.
"""

_PROOF = 3
"""A set of weights counts as come back at this many calls with it."""

_SETS = 128
"""Number of sets that are bound at once. Weights of other sets are passed as inputs."""


@dataclass(frozen=True, slots=True)
class Held(Generic[T]):
    """The object made for a set of weights, and these weights; replaced when one changes."""

    made: T
    members: WeightSet
    weights: BoundWeights


class BindingEngine(ABC, Generic[T]):
    """An engine for one region that takes weights in. Several threads may call it.

    Args:
        region: The region, with the weights to take in by address and their witnesses.
    """

    def __init__(self, region: Region) -> None:
        self._constants = region.constants
        self._lock: AbstractContextManager[Any] = forks.lock()
        self._positions = tuple(region.weights)
        self._pick = picker(self._positions)
        self._witnessed = [i for i, at in enumerate(self._positions) if at in region.witnesses]
        self._sets: dict[Hashable, Held[T]] = {}
        self._waiting: dict[Hashable, WeightSet] = {}
        self._died = 0
        self._changes_allowed: float = _RESTLESS
        self._unbound: Held[T] | None = None
        self._weightless: Held[T] | None = None

    @abstractmethod
    def _make(self, values: Mapping[int, torch.Tensor]) -> T:
        """Make an object that runs the region with these values, by argument position, taken in."""

    @property
    def bounds(self) -> list[T]:
        """The objects of all sets that are bound now, the oldest first."""
        return [each.made for each in self._sets.values()]

    def bind_first(self, region: Region) -> T:
        """Take in the region's own weights. To be called once, before the first call."""
        weights = tuple(region.weights.values())
        witnesses = {i: region.witnesses[self._positions[i]] for i in self._witnessed}
        first = self._bind(weights, self._members(weights, witnesses))
        self._sets[identities(weights)] = first
        self._weightless = None if weights else first
        return first.made

    def _made_for(self, args: tuple[Any, ...]) -> T:
        """Return the object for the weights among these arguments, with their present values."""
        weightless = self._weightless  # another thread may drop it
        if weightless is not None:
            return weightless.made
        weights = self._pick(args)
        held = self._sets.get(identities(weights))
        if held is None or not held.weights.unchanged(weights):
            with self._lock:
                held = self._renewed(weights)
        return held.made

    def _drop_all(self, made: T) -> None:
        """Drop all objects, so that the next calls make them again.

        Nothing is done if ``made`` was dropped already.
        """
        held = [*self._sets.values(), self._unbound, self._weightless]
        if any(each is not None and each.made is made for each in held):
            self._sets.clear()
            self._unbound = self._weightless = None

    def _renewed(self, weights: tuple[torch.Tensor, ...]) -> Held[T]:
        """Return an object with the present values. The model is not exported again."""
        key = identities(weights)
        held = self._sets.get(key)
        if held is None:
            return self._made_first(key, weights)
        changed = held.weights.changed(weights)
        if changed or held.weights.expired:
            held.members.changes.update(changed)
            held = self._sets[key] = self._bind(weights, held.members)
        return held

    def _made_first(self, key: Hashable, weights: tuple[torch.Tensor, ...]) -> Held[T]:
        """Return an object for a set of weights that has none yet."""
        if len(self._sets) >= _SETS:
            return self._without_weights()
        members = self._waiting.get(key)
        if members is None:
            found = find_witnesses({i: weights[i] for i in self._witnessed})
            witnesses = {i: each for i, each in found.items() if each is not None}
            members = self._waiting[key] = self._members(weights, witnesses)
        members.calls += 1
        if self._died >= _RESTLESS and members.calls < _PROOF:
            return self._without_weights()
        held = self._sets[key] = self._bind(weights, members)
        self._waiting.pop(key, None)
        return held

    def _members(
        self, weights: tuple[torch.Tensor, ...], witnesses: Mapping[int, torch.Tensor]
    ) -> WeightSet:
        """Return the weights as a set that the engine forgets when one of them dies.

        A weight may die at any moment, in any thread and while the lock is held. So ``forget``
        takes no lock.
        """
        key, reference = identities(weights), weakref.ref(self)

        def forget(_: object) -> None:
            engine = reference()
            if engine is not None:
                engine._waiting.pop(key, None)
                engine._died += engine._sets.pop(key, None) is not None

        return WeightSet(weights, witnesses, forget)

    def _without_weights(self) -> Held[T]:
        """Return the object that takes all weights as inputs."""
        if self._unbound is None:
            self._unbound = self._bind((), self._members((), {}))
        return self._unbound

    def _bind(self, weights: tuple[torch.Tensor, ...], members: WeightSet) -> Held[T]:
        allowed = {i: each for i, each in enumerate(weights) if self._may_bind(i, members)}
        bound = watchable(allowed)
        # The state of the weights is read before their values: a write in between is then seen.
        state = BoundWeights(bound, members)
        values = {self._positions[i]: each for i, each in bound.items()} | self._constants
        return Held(self._make(values), members, state)

    def _may_bind(self, i: int, members: WeightSet) -> bool:
        lacks_witness = i in self._witnessed and i not in members.witnesses
        is_restless = members.changes[i] >= self._changes_allowed
        return members.found is None and not lacks_witness and not is_restless
