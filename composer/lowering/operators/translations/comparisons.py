"""Translations of comparisons and look-ups that are right for NaN and for indices out of range.

ONNX does not define the results of ``ReduceMax``, ``ArgMax``, ``TopK`` and ``MaxPool`` for NaN. In
ONNX Runtime 1.32 NaN is sometimes ignored and sometimes not; only its ``TopK`` is right. In torch
the maximum and the minimum of numbers with NaN are NaN, and NaN sorts as the largest.

ONNX counts negative indices from the end. Torch does so in indexing only: in ``embedding``,
``gather``, ``index_select`` and ``scatter`` a negative index is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript
from onnxscript.function_libs.torch_lib.ops import core

from composer.lowering.operators.translations.annotations import INT64, TReal, TTensor

op: Any = onnxscript.opset18

_ABOVE = (np.array(np.inf), np.array(np.finfo(np.float64).max))
"""The sort keys in float64 that stand for NaN and for infinity."""


def is_float(x: Any) -> bool:
    """True if the dtype of the value is a floating-point one."""
    return bool(x.dtype.is_floating_point())


def constant(value: float, like: Any) -> Any:
    """A number in the dtype of ``like``."""
    return op.Constant(value=ir.tensor(np.array(value, dtype=like.dtype.numpy())))


def spoilt(squares: Any) -> Any:
    """True where a reduced value is NaN; a sum of squares is NaN only if an element is."""
    return op.IsNaN(squares)


def spoil(result: Any, squares: Any, x: Any) -> Any:
    """The result, with NaN where the sum of squares is NaN.

    The result is multiplied by NaN or one, because ``Where`` drops the sign of a zero.
    """
    return op.Mul(result, op.Where(spoilt(squares), squares, constant(1.0, x)))


def extreme(reduce: Any, x: Any, dims: Sequence[int] | None, keepdim: bool) -> Any:
    """The largest or smallest along ``dims``; NaN where an element is NaN."""
    axes = None if dims is None else op.Constant(value_ints=list(dims))
    found = reduce(x, axes, keepdims=keepdim)
    if not is_float(x):
        return found
    return spoil(found, op.ReduceSumSquare(x, axes, keepdims=keepdim), x)


def place(arg: Any, x: Any, dim: int, keepdim: bool) -> Any:
    """The index of the largest or smallest along ``dim``; of the first NaN where there is one."""
    found = arg(x, axis=dim, keepdims=keepdim)
    if not is_float(x):
        return found
    first = op.ArgMax(op.Cast(op.IsNaN(x), to=ir.DataType.INT32), axis=dim, keepdims=keepdim)
    axes = op.Constant(value_ints=[dim])
    return op.Where(spoilt(op.ReduceSumSquare(x, axes, keepdims=keepdim)), first, found)


def amax(self: TReal, dim: Sequence[int], keepdim: bool = False) -> TReal:
    """``aten.amax``."""
    return extreme(op.ReduceMax, self, dim, keepdim)


def amin(self: TReal, dim: Sequence[int], keepdim: bool = False) -> TReal:
    """``aten.amin``."""
    return extreme(op.ReduceMin, self, dim, keepdim)


def maximum_of_all(self: TReal) -> TReal:
    """``aten.max``."""
    return extreme(op.ReduceMax, self, None, False)


def minimum_of_all(self: TReal) -> TReal:
    """``aten.min``."""
    return extreme(op.ReduceMin, self, None, False)


def max_dim(self: TReal, dim: int, keepdim: bool = False) -> tuple[TReal, INT64]:
    """``aten.max.dim``."""
    found = extreme(op.ReduceMax, self, [dim], keepdim)
    return found, place(op.ArgMax, self, dim, keepdim)


def min_dim(self: TReal, dim: int, keepdim: bool = False) -> tuple[TReal, INT64]:
    """``aten.min.dim``."""
    found = extreme(op.ReduceMin, self, [dim], keepdim)
    return found, place(op.ArgMin, self, dim, keepdim)


def argmax(self: TReal, dim: int | None = None, keepdim: bool = False) -> INT64:
    """``aten.argmax``."""
    return _place_of(op.ArgMax, self, dim, keepdim)


def argmin(self: TReal, dim: int | None = None, keepdim: bool = False) -> INT64:
    """``aten.argmin``."""
    return _place_of(op.ArgMin, self, dim, keepdim)


def _place_of(arg: Any, x: Any, dim: int | None, keepdim: bool) -> Any:
    if dim is not None:
        return place(arg, x, dim, keepdim)
    flat = op.Reshape(x, op.Constant(value_ints=[-1]))
    flat.type = x.type
    found = place(arg, flat, 0, False)
    return op.Reshape(found, op.Constant(value_ints=[1] * len(x.shape))) if keepdim else found


def ordered(x: Any, count: Any, dim: int, largest: bool) -> tuple[Any, Any]:
    """The first ``count`` elements of the sorted ``x``, and their indices.

    They are sorted by a key in float64, so the largest finite float64 is equal to infinity.
    """
    if not is_float(x):
        values, places = op.TopK(x, count, axis=dim, largest=largest, sorted=True)
        return values, places
    wide = op.Cast(x, to=ir.DataType.DOUBLE)
    infinity, most = (op.Constant(value=ir.tensor(each)) for each in _ABOVE)
    key = op.Where(op.IsNaN(wide), infinity, op.Min(wide, most))
    _, places = op.TopK(key, count, axis=dim, largest=largest, sorted=True)
    return op.GatherElements(x, places, axis=dim), places


def sort(
    self: TReal, dim: int = -1, descending: bool = False, stable: bool = False
) -> tuple[TReal, INT64]:
    """``aten.sort``: NaN is the largest."""
    if isinstance(self.shape[dim], int):
        count = op.Constant(value_ints=[self.shape[dim]])
    else:
        count = op.Shape(self, start=dim % len(self.shape), end=dim % len(self.shape) + 1)
    return ordered(self, count, dim, descending)


def topk(
    self: TReal, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TReal, INT64]:
    """``aten.topk``: NaN is the largest."""
    return ordered(self, op.Reshape(k, op.Constant(value_ints=[1])), dim, largest)


def checked(index: Any) -> Any:
    """The index as int64, with negative numbers replaced by one that is far out of range.

    Both are errors in torch, but in ONNX only an index that is out of range is.
    """
    long = op.Cast(index, to=ir.DataType.INT64)
    beyond, zero = (op.Constant(value_int=each) for each in (2**62, 0))
    found = op.Where(op.Less(long, zero), beyond, long)
    found.shape, found.type = index.shape, ir.TensorType(ir.DataType.INT64)
    return found


def embedding(
    weight: TTensor,
    indices: TTensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TTensor:
    """``aten.embedding``."""
    return op.Gather(weight, checked(indices))


def indexed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Torchlib's translation of an operator whose third argument is an index, with that checked."""

    @functools.wraps(plain)
    def translation(x: Any, dim: int, index: Any, *others: Any, **named: Any) -> Any:
        return plain(x, dim, checked(index), *others, **named)

    return translation


index_select = indexed(core.aten_index_select)
gather = indexed(core.aten_gather)
scatter = indexed(core.aten_scatter_src)
scatter_value = indexed(core.aten_scatter_value)
scatter_add = indexed(core.aten_scatter_add)


def scatter_reduce(
    self: TTensor, dim: int, index: TTensor, src: TTensor, reduce: str, include_self: bool = True
) -> TTensor:
    """``aten.scatter_reduce``; a maximum or minimum that includes NaN is NaN.

    Torchlib starts ``amax`` and ``amin`` at the lowest or largest finite number, which is wrong for
    infinities. They start at an infinity here.
    """
    index = checked(index)
    if reduce not in ("amax", "amin") or not is_float(self):
        return core.aten_scatter_reduce(self, dim, index, src, reduce, include_self)
    beginning = self
    if not include_self:
        least = constant(-np.inf if reduce == "amax" else np.inf, src)
        beginning = op.ScatterElements(self, index, op.Expand(least, op.Shape(src)), axis=dim)
        beginning.shape, beginning.type = self.shape, self.type
    found = core.aten_scatter_reduce(beginning, dim, index, src, reduce, True)
    start = op.Mul(self, self)
    if not include_self:
        zeros = op.Mul(src, constant(0.0, src))
        zeros = op.Where(op.IsNaN(zeros), constant(0.0, src), zeros)
        start = op.ScatterElements(start, index, zeros, axis=dim)
    squares = op.ScatterElements(start, index, op.Mul(src, src), axis=dim, reduction="add")
    return spoil(found, squares, self)
