"""Translation of what puts rows along one dimension: the dimensions stay in their order.

See :mod:`composer.lowering.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxscript
import torch
from onnxscript.function_libs.torch_lib.ops import core

from composer.lowering import rows

if TYPE_CHECKING:  # onnxscript's own, which the exporter reads, are of no use to a type checker
    TTensor: TypeAlias = Any
    INT64: TypeAlias = Any
else:
    from onnxscript import INT64
    from onnxscript.function_libs.torch_lib.tensor_typing import TTensor

aten = torch.ops.aten
op: Any = onnxscript.opset18


def index_put(
    self: TTensor, indices: Sequence[INT64 | None], values: TTensor, accumulate: bool = False
) -> TTensor:
    """``aten.index_put``; what puts no rows, or adds them, is the exporter's."""
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
