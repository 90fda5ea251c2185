"""Operators that reshape, split, stack and pad tensors, or write to parts of them."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators, operands_of
from composer.lowering.operators.guards import are_known, only_for

aten = torch.ops.aten


def entries() -> Operators:
    """The entries of this module."""
    slice_, select = aten.slice_scatter.default, aten.select_scatter.default
    return {
        aten.squeeze.default: Operator(squeeze_ones),
        aten.squeeze.dims: Operator(squeeze_several),
        aten.squeeze: Operator(unsupported=(dynamic_squeeze,)),
        aten.view.default: Operator(translate="shapes:view"),
        aten._unsafe_view.default: Operator(translate="shapes:view"),
        aten.expand.default: Operator(translate="shapes:expand"),
        aten.split.Tensor: Operator(translate="shapes:split"),
        aten.split_with_sizes.default: Operator(translate="shapes:split_with_sizes"),
        aten.unsafe_split.Tensor: Operator(translate="shapes:split"),
        aten.unsafe_split_with_sizes.default: Operator(translate="shapes:split_with_sizes"),
        aten.stack.default: Operator(stack),
        aten.constant_pad_nd.default: Operator(constant_pad),
        aten.copy.default: Operator(copy),
        aten.slice_scatter.default: Operator(functools.partial(put_part, slice_)),
        aten.select_scatter.default: Operator(functools.partial(put_part, select)),
        aten.diagonal.default: Operator(translate="shapes:diagonal"),
        aten.diagonal_copy.default: Operator(translate="shapes:diagonal"),
        aten.diagonal: Operator(unsupported=(dynamic_diagonal,)),
        aten.diagonal_copy: Operator(unsupported=(dynamic_diagonal,)),
        aten.diagonal_scatter.default: Operator(diagonal_scatter, or_whole=True),
        aten.as_strided_scatter.default: Operator(as_strided_scatter),
    }


def squeeze_ones(x: torch.Tensor) -> Any:
    """``aten.squeeze`` with the dimensions given whose size is known to be one.

    Without them the rank of the result is not known, which not all engines support.
    """
    return x.squeeze(_ones(x, range(x.dim())))


def _ones(x: torch.Tensor, dims: Iterable[int]) -> list[int]:
    """Those of the dimensions whose size is known to be one, the last first."""
    ones = {dim % x.dim() for dim in dims if isinstance(x.shape[dim], int) and x.shape[dim] == 1}
    return sorted(ones, reverse=True)


@only_for(torch.Tensor.dim)
def squeeze_several(x: torch.Tensor, dims: Sequence[int]) -> Any:
    """``aten.squeeze.dims`` as one ``aten.squeeze.dim`` per dimension.

    Torch's own decomposition uses primitives, which torch takes 60 times as long to run. It runs
    them to make a view that the graph returns, such as the deviations that a batch norm saves for
    its backward. There were three per norm, which took half a millisecond.
    """
    if not are_known(x.shape[dim] for dim in dims):
        return NotImplemented
    ones = _ones(x, dims)
    for dim in ones:
        x = aten.squeeze.dim(x, dim)
    return x if ones else aten.alias.default(x)


def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """``aten.stack`` of tensors with different dtypes, which are first cast to a common one."""
    dtypes = [each.dtype for each in tensors]
    if len(set(dtypes)) == 1:
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, dtypes)
    return aten.stack.default([each.to(dtype) for each in tensors], dim)


def constant_pad(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> Any:
    """A copy of the input in place of a pad by zero elements.

    Models for inputs of any size contain such pads, and ONNX Runtime would copy the tensor for
    each. Swin pads before every block, which made a call at a tiny size 1.03 times as long.
    """
    return NotImplemented if not are_known(pad) or any(pad) else x.clone()


def copy(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """``aten.copy`` with a source that is first expanded to the shape of ``x``.

    The translation returns the source in its own shape.
    """
    if x.shape == src.shape:
        return NotImplemented
    return aten.copy.default(x, src.expand(x.shape), non_blocking)


def put_part(operator: Any, x: torch.Tensor, src: torch.Tensor, *place: Any, **places: Any) -> Any:
    """The scatter with values cast to the dtype of ``x``, if their dtype differs."""
    if src.dtype is x.dtype:
        return NotImplemented
    return operator(x, src.to(x.dtype), *place, **places)


@only_for(_torch.tensors.is_row_major)
def diagonal_scatter(
    x: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    """``aten.diagonal_scatter`` as ``index_put`` at the indices of the diagonal."""
    along = torch.arange(src.shape[-1], device=x.device)
    places = along + max(-offset, 0), along + max(offset, 0)
    put = torch.index_put(x.movedim((dim1, dim2), (0, 1)), places, src.movedim(-1, 0))
    return put.movedim((0, 1), (dim1, dim2)).contiguous()


@only_for(_torch.tensors.is_row_major)
def as_strided_scatter(
    x: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: Any = None,
) -> Any:
    """``aten.as_strided_scatter`` that replaces all elements of ``x``; other calls are declined.

    The backward of a mean over images in channels-last format contains such a call.
    """
    if not are_known((*x.shape, *size, *stride)) or storage_offset or x.storage_offset():
        return NotImplemented
    if math.prod(size) != x.numel() or not _is_row_major(size, stride):
        return NotImplemented
    return src.contiguous().view(x.shape).clone()


def _is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    following = itertools.accumulate(reversed(sizes), operator.mul, initial=1)
    steps = zip(reversed(sizes), reversed(strides), following, strict=False)
    return all(stride == step for size, stride, step in steps if size != 1)


def dynamic_squeeze(node: torch.fx.Node) -> str | None:
    """Why a squeeze must not be translated: the size may be one in the first call only."""
    (value,) = operands_of(node)
    if len(node.args) < 2 or not value.dim():
        return None
    dims: Any = node.args[1] if isinstance(node.args[1], list | tuple) else (node.args[1],)
    if are_known(value.shape[dim] for dim in dims):
        return None
    return "a dynamic dimension is squeezed"


def dynamic_diagonal(node: torch.fx.Node) -> str | None:
    """Why a diagonal must not be translated: it is read at indices, which have to be known."""
    (value,) = operands_of(node)
    dims = [_torch.operators.argument(node, name) for name in ("dim1", "dim2")]
    return None if are_known(value.shape[dim] for dim in dims) else "a diagonal of dynamic size"
