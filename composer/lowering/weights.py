"""Weights bound into an engine by address, and the check that they are still the same."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_versions = operator.attrgetter("_version")


def can_bind(value: Any) -> bool:
    """Whether a change of this tensor could be seen, and its memory shared.

    Inference tensors have no version counter; subclasses and sparse tensors have no one address.
    """
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout is torch.strided
        and not value.is_inference()
        and value.numel() > 0
    )


class BoundWeights:
    """Tensors an engine took by address, at fixed positions among its arguments.

    A weight is the same while its identity, ``data_ptr`` and ``_version`` are: an in-place update
    raises the version, ``load_state_dict`` too, ``p.data = new`` keeps it and moves the address, a
    replaced parameter is another object. ``p.data.mul_()`` and writes through numpy keep all
    three and cannot be seen.

    Args:
        tensors: Position among the arguments to the tensor bound there.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self.positions = tuple(tensors)
        self.tensors = tuple(tensors.values())
        self._versions = list(map(_versions, self.tensors))
        self._addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        self._pick = _picker(self.positions)

    def unchanged(self, args: Sequence[Any]) -> bool:
        """Whether every bound tensor is in its place, at its address, in its version."""
        given = self._pick(args)
        return (
            all(map(operator.is_, given, self.tensors))
            and list(map(_versions, given)) == self._versions
            and list(map(torch.Tensor.data_ptr, given)) == self._addresses
        )

    def changed(self, args: Sequence[Any]) -> frozenset[int]:
        """Positions of the weights that are not what was bound."""
        return frozenset(
            position
            for position, tensor, version, address in zip(
                self.positions, self.tensors, self._versions, self._addresses, strict=True
            )
            if args[position] is not tensor
            or tensor._version != version
            or tensor.data_ptr() != address
        )


def _picker(positions: tuple[int, ...]) -> operator.itemgetter[Any] | Any:
    """``itemgetter`` that gives a tuple for any number of positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda args: tuple(args[position] for position in positions)
