"""Decompositions for dtypes: what ONNX Runtime has no kernel for, and what ONNX does not promote.

``Where``, ``ReduceMax`` and ``Floor`` lack kernels for some dtypes that torch's operators take;
``Concat`` and ``ScatterND`` want one dtype for all operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def dtypes() -> dict[Any, Callable[..., Any]]:
    """The table of this module's decompositions."""
    rounding = (aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default)
    putting = (aten.slice_scatter.default, aten.select_scatter.default)
    norms = (aten.native_layer_norm.default, aten.native_group_norm.default)
    return (
        dict.fromkeys(rounding, whole)
        | {each: functools.partial(put, each) for each in putting}
        | {each: functools.partial(norm, each) for each in norms}
        | {
            aten.where.self: where,
            aten.masked_fill.Scalar: masked_fill,
            aten.masked_fill.Tensor: masked_fill,
            aten.stack.default: stack,
        }
    )


def where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """A choice between booleans, by logical operators."""
    if a.dtype is not torch.bool or b.dtype is not torch.bool:
        return NotImplemented
    return (condition & a) | (~condition & b)


def masked_fill(x: torch.Tensor, mask: torch.Tensor, value: Any) -> Any:
    """A fill of booleans, by logical operators."""
    if x.dtype is not torch.bool:
        return NotImplemented
    if isinstance(value, torch.Tensor):
        return where(mask, value, x)
    return x | mask if value else x & ~mask


def whole(x: torch.Tensor) -> Any:
    """Rounding of an integer, which does nothing."""
    return NotImplemented if x.dtype.is_floating_point else x.clone()


def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """A stack of tensors of several dtypes, promoted first."""
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    if all(each.dtype is dtype for each in tensors):
        return NotImplemented
    return aten.stack.default([each.to(dtype) for each in tensors], dim)


def put(operator: Any, x: torch.Tensor, src: torch.Tensor, *place: Any, **places: Any) -> Any:
    """A scatter of values of another dtype, cast first to that of ``x``."""
    if src.dtype is x.dtype:
        return NotImplemented
    return operator(x, src.to(x.dtype), *place, **places)


def norm(operator: Any, x: torch.Tensor, *given: Any) -> Any:
    """A norm of halves by weights of float32, as autocast leaves it, computed in float32.

    On the CPU its mean and deviation are float32, but torch's fake kernel says halves (2.13).
    """
    wide = any(isinstance(each, torch.Tensor) and each.dtype is torch.float32 for each in given)
    if not wide or x.dtype not in (torch.bfloat16, torch.float16) or x.device.type != "cpu":
        return NotImplemented
    result, mean, deviation = operator(x.float(), *given)
    return result.to(x.dtype), mean, deviation
