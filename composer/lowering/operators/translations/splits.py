"""Translations of splits: a value for each piece, where torchlib makes a sequence of them.

ONNX Runtime (1.31) copies every piece twice then, into the sequence and out of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import onnxscript
import torch
from onnxscript.function_libs.torch_lib.ops import core

if TYPE_CHECKING:  # onnxscript's own, which the exporter reads, are of no use to a type checker
    INT64: TypeAlias = Any
    TTensor: TypeAlias = Any
else:
    from onnxscript import INT64
    from onnxscript.function_libs.torch_lib.tensor_typing import TTensor

aten = torch.ops.aten
op: Any = onnxscript.opset18


def pieces(x: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    """``x`` in pieces of these sizes."""
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
    """``aten.split.Tensor``: pieces of one size; the last may be smaller, or the only one empty."""
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
