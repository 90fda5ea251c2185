"""Translations of views, splits, diagonals and ``index_put``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxscript
from onnxscript.function_libs.torch_lib.ops import common, core

from composer.lowering import rows

if TYPE_CHECKING:  # the exporter reads onnxscript's types; type checkers cannot
    INT64: TypeAlias = Any
    TTensor: TypeAlias = Any
else:
    from onnxscript import INT64
    from onnxscript.function_libs.torch_lib.tensor_typing import TTensor

op: Any = onnxscript.opset18


def shape_of(size: Sequence[Any]) -> Any:
    """The sizes as one ONNX value, which is a constant if all sizes are known.

    Torchlib emits one constant per dimension and joins them at run time.
    """
    if all(isinstance(each, int) for each in size) and size:
        return op.Constant(value_ints=list(size))
    return common.merge_dims(size)


def view(self: TTensor, size: Sequence[INT64]) -> TTensor:
    """``aten.view``."""
    return op.Reshape(self, shape_of(size), allowzero=True)


def expand(self: TTensor, size: Sequence[INT64], implicit: bool = False) -> TTensor:
    """``aten.expand``; ONNX says 1 where torch says -1."""
    return op.Expand(
        self, shape_of([1 if isinstance(each, int) and each == -1 else each for each in size])
    )


def pieces(x: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    """The pieces of ``x`` along ``dim`` with these sizes, one ONNX value each.

    Torchlib makes a sequence of them. ONNX Runtime 1.31 then copies every piece twice, into the
    sequence and out of it.
    """
    if len(sizes) == 1:
        return [op.Identity(x)]
    if len(set(sizes)) == 1 and sizes[0]:
        return list(op.Split(x, axis=dim, num_outputs=len(sizes)))
    ends = list(itertools.accumulate(sizes))
    bounds = zip([0, *ends], ends, strict=False)
    axis = op.Constant(value_ints=[dim])
    each = op.Constant
    return [op.Slice(x, each(value_ints=[a]), each(value_ints=[b]), axis) for a, b in bounds]


def split(self: TTensor, split_size: INT64, dim: int = 0) -> TTensor:
    """``aten.split.Tensor``: pieces of one size, of which the last may be smaller.

    An empty dimension gives one empty piece.
    """
    whole = self.shape[dim]
    if not (isinstance(whole, int) and isinstance(split_size, int)):
        return core.aten_split(self, split_size, dim)
    starts = range(0, whole, split_size or 1)
    return pieces(self, [min(split_size, whole - each) for each in starts] or [whole], dim)


def split_with_sizes(self: TTensor, split_sizes: Sequence[INT64], dim: int = 0) -> TTensor:
    """``aten.split_with_sizes``."""
    if not all(isinstance(each, int) for each in split_sizes):
        return core.aten_split_with_sizes(self, split_sizes, dim)
    return pieces(self, split_sizes, dim)


def diagonal(self: TTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TTensor:
    """``aten.diagonal`` as a gather of its elements; a dynamic size is left to torchlib.

    Torchlib multiplies by a matrix of zeros and ones and sums up. An infinity off the diagonal then
    turns elements of the diagonal into NaN.
    """
    dims = [dim % len(self.shape) for dim in (dim1, dim2)]
    rows, columns = (self.shape[dim] for dim in dims)
    if not isinstance(rows, int) or not isinstance(columns, int):
        return core.aten_diagonal(self, offset, dim1, dim2)
    down, right = max(-offset, 0), max(offset, 0)
    count = max(min(rows - down, columns - right), 0)
    others = [dim for dim in range(len(self.shape)) if dim not in dims]
    planes = op.Transpose(self, perm=[*others, *dims])
    flat = op.Reshape(planes, op.Constant(value_ints=[*([0] * len(others)), -1]))
    places = [(each + down) * columns + each + right for each in range(count)]
    indices = op.Constant(value=ir.tensor(places, dtype=ir.DataType.INT64))
    return op.Gather(flat, indices, axis=len(others))


def index_put(
    self: TTensor, indices: Sequence[INT64 | None], values: TTensor, accumulate: bool = False
) -> TTensor:
    """``aten.index_put`` of a few whole rows; other calls are left to the exporter's translation.

    The dimensions keep their order, see :mod:`composer.lowering.rows`.
    """
    along = [dim for dim, each in enumerate(indices) if each is not None]
    places = indices[along[0]] if len(along) == 1 else None
    if accumulate or places is None or places.dtype is not ir.DataType.INT64:
        return core.aten_index_put(self, indices, values, accumulate)
    (dim,), shape = along, [*self.shape]
    count: Any = places.shape[0] if len(places.shape) == 1 else None
    if not self.dtype.is_floating_point() or not rows.are_few(shape, dim, count):
        return core.aten_index_put(self, indices, values, accumulate)
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
