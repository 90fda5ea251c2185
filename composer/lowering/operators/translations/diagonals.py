"""Translation of a diagonal: the elements on it, read by their places.

Torchlib's is a sum over what is multiplied by a matrix of zeros and ones: an infinity off the
diagonal makes NaN of what lies on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import onnx_ir as ir
import onnxscript
import torch
from onnxscript.function_libs.torch_lib.ops import core

if TYPE_CHECKING:  # onnxscript's own, which the exporter reads, are of no use to a type checker
    TTensor: TypeAlias = Any
else:
    from onnxscript.function_libs.torch_lib.tensor_typing import TTensor

aten = torch.ops.aten
op: Any = onnxscript.opset18


def diagonal(self: TTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TTensor:
    """``aten.diagonal``; one of dynamic size is left to torch."""
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
