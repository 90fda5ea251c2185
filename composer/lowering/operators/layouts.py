"""Decompositions whose results have the strides that the operator itself gives in eager.

Eager's kernels derive the strides of a result from their operands, each in its own way. A
decomposition gives the strides of its last operation instead. An engine returns its results with
the strides that the graph says, so the decomposition has to restore those of the operator.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from composer import _torch
from composer.lowering.operators.entry import Function, Operator, Operators
from composer.lowering.operators.guards import are_known


def lying_as_in_eager(entries: Operators) -> dict[Any, Operator]:
    """The entries, with decompositions whose results have the strides of the operators' results.

    Those strides are found by a call of the operator on torch's fake tensors.
    """
    return {each: _with_strides(each, entry) for each, entry in entries.items()}


def with_strides_of_operands(entries: Operators) -> dict[Any, Operator]:
    """The entries of elementwise operators, with decompositions whose results have eager's strides.

    In eager the strides of such a result are those of a sum of the operands. Fake results are not
    used: up to torch 2.15, those of ``copysign`` and ``floor_divide`` have other strides
    (``tests/lowering/test_torch_faults.py``).
    """
    return {each: _with_strides(_sum, entry) for each, entry in entries.items()}


def _with_strides(like: Function, entry: Operator) -> Operator:
    assert entry.decompose is not None
    return dataclasses.replace(entry, decompose=functools.partial(_laid_out, like, entry.decompose))


def _laid_out(like: Function, function: Function, *args: Any, **kwargs: Any) -> Any:
    """The result of ``function``, with the order of dimensions in memory of ``like``'s result.

    ``like`` is called only if an operand is not contiguous. An operand with symbolic sizes or
    strides counts as contiguous, because a look at its strides might add guards.
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
    return not are_known((*x.shape, *x.stride())) or x.is_contiguous()


def _ordered(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value, copied if needed so that its dimensions have the order of ``like`` in memory."""
    if _order(value) == _order(like):
        return value
    order = _order(like)
    order += [dim for dim in range(value.dim()) if dim not in order]
    return value.permute(order).contiguous().permute([*map(order.index, range(value.dim()))])


def _order(x: torch.Tensor) -> list[int]:
    """The dimensions of more than one element, by descending stride."""
    dims = [dim for dim in range(x.dim()) if x.shape[dim] != 1]
    return sorted(dims, key=x.stride, reverse=True)
