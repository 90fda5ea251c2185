"""The strides of what is decomposed: those that the operator itself gives its result.

Eager's kernels take the order of memory from their operands, each in its own way; a decomposition
gives that of its last operation. An engine returns its results in the order that the graph tells.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Function, Operator, Operators


def lying_as_in_eager(entries: Operators) -> dict[Any, Operator]:
    """The entries, with results that lie in memory as those of the operators do.

    Torch's fake tensors say how that is.
    """
    return {each: _lying(each, entry) for each, entry in entries.items()}


def lying_as_operands(entries: Operators) -> dict[Any, Operator]:
    """The entries of elementwise operators, with results that lie as eager's do.

    Eager's lie as a sum of the operands does. Torch's fake tensors have others for ``copysign`` and
    ``floor_divide`` (2.13).
    """
    return {each: _lying(_sum, entry) for each, entry in entries.items()}


def _lying(like: Function, entry: Operator) -> Operator:
    assert entry.decompose is not None
    return dataclasses.replace(entry, decompose=functools.partial(_laid_out, like, entry.decompose))


def _laid_out(like: Function, function: Function, *args: Any, **kwargs: Any) -> Any:
    """What the function returns, in the order of memory of what ``like`` returns.

    Only what does not lie row by row is asked about, and no sizes that are symbols: that might set
    guards.
    """
    result = function(*args, **kwargs)
    if result is NotImplemented or all(map(_lies_by_rows, _tensors(args, kwargs))):
        return result
    with _torch.canonical.untraced():
        expected = like(*args, **kwargs)
    leaves, rebuild = _torch.tensors.flatten(result)
    return rebuild([*map(_ordered, leaves, _torch.tensors.flatten(expected)[0])])


def _sum(*args: Any, **kwargs: Any) -> Any:
    return sum(_tensors(args, kwargs))


def _tensors(*values: Any) -> list[torch.Tensor]:
    leaves, _ = _torch.tensors.flatten(values)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _lies_by_rows(x: torch.Tensor) -> bool:
    known = all(isinstance(each, int) for each in (*x.shape, *x.stride()))
    return not known or x.is_contiguous()


def _ordered(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value with its dimensions in memory in the order of another's."""
    if _order(value) == _order(like):
        return value
    order = _order(like)
    order += [dim for dim in range(value.dim()) if dim not in order]
    return value.permute(order).contiguous().permute([*map(order.index, range(value.dim()))])


def _order(x: torch.Tensor) -> list[int]:
    """The dimensions of more than one element, the farthest apart in memory first."""
    strides = x.stride()
    dims = [dim for dim in range(x.dim()) if x.shape[dim] != 1]
    return sorted(dims, key=lambda dim: -strides[dim])
