"""Translations of products of quantized numbers."""

from __future__ import annotations

from typing import Any

import onnxscript

from composer.lowering.operators.translations.annotations import TTensor

op: Any = onnxscript.opset18


def integer_product(self: TTensor, mat2: TTensor) -> TTensor:
    """``aten._int_mm``: int8 or uint8 times int8, with sums in int32."""
    return op.MatMulInteger(self, mat2)
