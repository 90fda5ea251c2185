"""Weights bound into an engine by address, and the check that they are still the same."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

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
        witnesses: Position to another tensor that is written to whenever the one there is, for
            weights that torch writes to without raising their version.
    """

    def __init__(
        self, tensors: Mapping[int, torch.Tensor], witnesses: Mapping[int, torch.Tensor]
    ) -> None:
        self.positions = tuple(tensors)
        self._tensors = tuple(tensors.values())
        self._versions = list(map(_versions, self._tensors))
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._witnesses = {i: witnesses[i] for i in self.positions if i in witnesses}
        self._witnessed = list(map(_versions, self._witnesses.values()))
        self._pick = _picker(self.positions)
        self._single = tuple(item for item in tensors.items() if item[1].numel() == 1)
        if self.positions:
            count_fused_steps()

    def unchanged(self, args: Sequence[Any]) -> bool:
        """Whether every bound tensor is in its place, at its address, in its version."""
        if not self.positions:
            return True
        given = self._pick(args)
        return (
            _are_identical(given, self._tensors)
            and all(args[i] is tensor for i, tensor in self._single)
            and list(map(_versions, given)) == self._versions
            and list(map(torch.Tensor.data_ptr, given)) == self._addresses
            and list(map(_versions, self._witnesses.values())) == self._witnessed
        )

    def changed(self, args: Sequence[Any]) -> frozenset[int]:
        """Positions of the weights that are not what was bound."""
        moved = {
            position
            for position, tensor, version, address in zip(
                self.positions, self._tensors, self._versions, self._addresses, strict=True
            )
            if args[position] is not tensor
            or tensor._version != version
            or tensor.data_ptr() != address
        }
        seen = zip(self._witnesses.items(), self._witnessed, strict=True)
        return frozenset(moved | {i for (i, each), version in seen if each._version != version})


def _are_identical(given: tuple[Any, ...], bound: tuple[Any, ...]) -> bool:
    """Whether each is the same object; a tensor of one element may be another of equal value.

    Comparing tuples looks at identity first, at a third of the cost of ``is`` for each. Only where
    that fails are tensors compared by value, which has no one truth for more than one element.
    """
    try:
        return given == bound
    except RuntimeError:
        return False


def _picker(positions: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """``itemgetter`` that gives a tuple for any number of positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda args: tuple(args[position] for position in positions)


@functools.cache
def count_fused_steps() -> None:
    """Have every step of a fused optimizer raise the versions of the parameters it wrote to.

    The fused kernels (``AdamW(..., fused=True)`` and kin, torch 2.13) do not; the day they do,
    ``tests/test_weights.py`` says so and this hook can go.
    """
    register_optimizer_step_post_hook(_raise_versions)


def _raise_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([p for p in group["params"] if p.grad is not None])
