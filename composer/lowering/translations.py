"""Translations of ours that stand before the exporter's.

Torchlib builds the shape that an operator is given from one constant a dimension, joined at run
time. Shapes that are known become one constant here: a fifth of the nodes of a transformer less to
translate (bench/README.md, "Export").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer import _torch
from composer.lowering.comparisons import comparisons
from composer.lowering.pooling import pools

aten = torch.ops.aten


@functools.cache
def translator() -> _torch.OnnxTranslator:
    """The exporter's translator, with our translations in front."""
    made = _torch.OnnxTranslator()
    made.register(translations())
    return made


def translations() -> dict[Any, Callable[..., Any]]:
    """Operator to a function that emits ONNX nodes; see ``torch.onnx.ops`` for how they work."""
    from onnxscript import INT64, opset18
    from onnxscript.function_libs.torch_lib.ops import common
    from onnxscript.function_libs.torch_lib.tensor_typing import TTensor

    def shape_of(size: Sequence[Any]) -> Any:
        if all(isinstance(each, int) for each in size) and size:
            return opset18.Constant(value_ints=list(size))
        return common.merge_dims(size)

    def view(self: TTensor, size: Sequence[INT64]) -> TTensor:
        return opset18.Reshape(self, shape_of(size), allowzero=True)  # type: ignore[type-var]

    def expand(self: TTensor, size: Sequence[INT64], implicit: bool = False) -> TTensor:
        kept = [1 if isinstance(each, int) and each == -1 else each for each in size]
        return opset18.Expand(self, shape_of(kept))  # type: ignore[type-var]

    # The exporter reads types from these, which are only known here.
    view.__annotations__ = {"self": TTensor, "size": Sequence[INT64], "return": TTensor}
    expand.__annotations__ = {**view.__annotations__, "implicit": bool}
    made = {aten.view.default: view, aten._unsafe_view.default: view, aten.expand.default: expand}
    return made | comparisons() | pools()
