"""Translations of views that are given a shape: one constant where it is known.

Torchlib builds it from one constant a dimension, joined at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import onnxscript
import torch
from onnxscript.function_libs.torch_lib.ops import common

if TYPE_CHECKING:  # onnxscript's own, which the exporter reads, are of no use to a type checker
    INT64: TypeAlias = Any
    TTensor: TypeAlias = Any
else:
    from onnxscript import INT64
    from onnxscript.function_libs.torch_lib.tensor_typing import TTensor

aten = torch.ops.aten
op: Any = onnxscript.opset18


def shape_of(size: Sequence[Any]) -> Any:
    """The sizes as one value."""
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
