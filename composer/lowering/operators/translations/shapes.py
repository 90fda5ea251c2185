"""Translations of views, splits, diagonals and ``index_put``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript
from onnxscript.function_libs.torch_lib.ops import common, core

from composer.lowering import rows
from composer.lowering.operators.guards import are_known
from composer.lowering.operators.translations.annotations import INT64, TTensor

op: Any = onnxscript.opset18


def shape_of(size: Sequence[Any]) -> Any:
    """The sizes as one ONNX value, which is a constant if all sizes are known.

    Torchlib emits one constant per dimension and joins them at run time.
    """
    if size and are_known(size):
        return op.Constant(value_ints=list(size))
    return common.merge_dims(size)


def view(self: TTensor, size: Sequence[INT64]) -> TTensor:
    """``aten.view``."""
    return op.Reshape(self, shape_of(size), allowzero=True)


def expand(self: TTensor, size: Sequence[INT64], implicit: bool = False) -> TTensor:
    """``aten.expand``; ONNX says 1 where torch says -1."""
    sizes = [1 if isinstance(each, int) and each == -1 else each for each in size]
    return op.Expand(self, shape_of(sizes))


def pieces(x: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    """The pieces of ``x`` along ``dim`` with these sizes, one ONNX value each.

    Torchlib makes a sequence of them. ONNX Runtime 1.31 then copies every piece twice, into the
    sequence and out of it.
    """
    if len(sizes) == 1:
        return [op.Identity(x)]
    if len(set(sizes)) == 1 and sizes[0]:
        return list(op.Split(x, axis=dim, num_outputs=len(sizes)))
    ends = itertools.accumulate(sizes, initial=0)
    bounds = [op.Constant(value_ints=[end]) for end in ends]
    axis = op.Constant(value_ints=[dim])
    return [op.Slice(x, start, end, axis) for start, end in itertools.pairwise(bounds)]


def split(self: TTensor, split_size: INT64, dim: int = 0) -> TTensor:
    """``aten.split.Tensor``: pieces of one size, of which the last may be smaller.

    An empty dimension gives one empty piece.
    """
    whole = self.shape[dim]
    if not are_known((whole, split_size)):
        return core.aten_split(self, split_size, dim)
    if not whole:
        return pieces(self, [whole], dim)
    sizes = [min(split_size, whole - start) for start in range(0, whole, split_size)]
    return pieces(self, sizes, dim)


def split_with_sizes(self: TTensor, split_sizes: Sequence[INT64], dim: int = 0) -> TTensor:
    """``aten.split_with_sizes``."""
    if not are_known(split_sizes):
        return core.aten_split_with_sizes(self, split_sizes, dim)
    return pieces(self, split_sizes, dim)


def diagonal(self: TTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TTensor:
    """``aten.diagonal`` as a gather of its elements; a dynamic size is left to torchlib.

    Torchlib multiplies by a matrix of zeros and ones and sums up. An infinity off the diagonal then
    turns elements of the diagonal into NaN.
    """
    dims = [dim % len(self.shape) for dim in (dim1, dim2)]
    rows, columns = (self.shape[dim] for dim in dims)
    if not are_known((rows, columns)):
        return core.aten_diagonal(self, offset, dim1, dim2)
    down, right = max(-offset, 0), max(offset, 0)
    count = max(min(rows - down, columns - right), 0)
    others = [dim for dim in range(len(self.shape)) if dim not in dims]
    planes = op.Transpose(self, perm=[*others, *dims])
    flat = op.Reshape(planes, op.Constant(value_ints=[*([0] * len(others)), -1]))
    first, step = down * columns + right, columns + 1
    places = list(range(first, first + count * step, step))
    indices = op.Constant(value=ir.tensor(places, dtype=ir.DataType.INT64))
    return op.Gather(flat, indices, axis=len(others))


def index_put(
    self: TTensor, indices: Sequence[INT64 | None], values: TTensor, accumulate: bool = False
) -> TTensor:
    """``aten.index_put`` of a few whole rows; other calls are left to the exporter's translation.

    The dimensions keep their order, see :mod:`composer.lowering.rows`.
    """
    along = [dim for dim, index in enumerate(indices) if index is not None]
    if accumulate or len(along) != 1 or not self.dtype.is_floating_point():
        return core.aten_index_put(self, indices, values, accumulate)
    (dim,), shape = along, [*self.shape]
    places: Any = indices[dim]
    is_vector = places.dtype is ir.DataType.INT64 and len(places.shape) == 1
    if not is_vector or not rows.are_few(shape, dim, places.shape[0]):
        return core.aten_index_put(self, indices, values, accumulate)
    count = places.shape[0]
    if dim:
        before = np.moveaxis(np.indices(shape[:dim], dtype=np.int64), 0, -1)[..., None, :]
        before = np.repeat(before, count, axis=-2)
        last = op.Reshape(places, op.Constant(value_ints=[*([1] * dim), count, 1]))
        last = op.Expand(last, op.Constant(value_ints=[*shape[:dim], count, 1]))
        named = op.Concat(op.Constant(value=ir.tensor(before)), last, axis=-1)
    else:
        named = op.Unsqueeze(places, op.Constant(value_ints=[-1]))
    put = op.Constant(value_ints=[*shape[:dim], count, *shape[dim + 1 :]])
    return op.ScatterND(self, named, op.Expand(values, put))
