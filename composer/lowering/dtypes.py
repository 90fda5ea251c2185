"""Calls said by other operators, where those of ONNX do not have their dtype, or want one for all.

``Where``, ``ReduceMax`` and ``Floor`` have no kernel for every dtype that torch's operators take;
``Concat`` and ``ScatterND`` promote nothing.
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
    return (
        dict.fromkeys(rounding, whole)
        | {each: functools.partial(put, each) for each in putting}
        | {
            aten.where.self: where,
            aten.masked_fill.Scalar: masked_fill,
            aten.masked_fill.Tensor: masked_fill,
            aten.stack.default: stack,
        }
    )


def where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Of truth values, by logic."""
    if a.dtype is not torch.bool or b.dtype is not torch.bool:
        return NotImplemented
    return (condition & a) | (~condition & b)


def masked_fill(x: torch.Tensor, mask: torch.Tensor, value: Any) -> Any:
    """Of truth values, by logic."""
    if x.dtype is not torch.bool:
        return NotImplemented
    if isinstance(value, torch.Tensor):
        return where(mask, value, x)
    return x | mask if value else x & ~mask


def whole(x: torch.Tensor) -> Any:
    """An integer is whole already."""
    return NotImplemented if x.dtype.is_floating_point else x.clone()


def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """All in the dtype that holds each of them."""
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    if all(each.dtype is dtype for each in tensors):
        return NotImplemented
    return aten.stack.default([each.to(dtype) for each in tensors], dim)


def put(operator: Any, x: torch.Tensor, src: torch.Tensor, *place: Any, **places: Any) -> Any:
    """In the dtype of what is put into."""
    if src.dtype is x.dtype:
        return NotImplemented
    return operator(x, src.to(x.dtype), *place, **places)
