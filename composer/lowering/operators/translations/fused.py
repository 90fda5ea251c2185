"""Translations of composer's own operators: one node each, of ONNX Runtime's domain."""

from __future__ import annotations

from typing import Any

from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

from composer.lowering.operators.translations.annotations import TTensor


def _op(name: str, inputs: str, **attributes: OpSchema.AttrType) -> Any:
    """A function that emits a node of ``com.microsoft``, for which onnxscript has no schema."""
    schema = OpSchema(
        name,
        "com.microsoft",
        1,
        inputs=[OpSchema.FormalParameter(each, "T") for each in inputs],
        outputs=[OpSchema.FormalParameter("output", "T")],
        type_constraints=[("T", ["tensor(float)"], "")],
        attributes=[OpSchema.Attribute(key, kind) for key, kind in attributes.items()],
    )
    return Op(Opset("com.microsoft", 1), name, schema)


_gelu = _op("Gelu", "X")
_attention = _op(
    "MultiHeadAttention", "QKV", num_heads=OpSchema.AttrType.INT, scale=OpSchema.AttrType.FLOAT
)


def gelu(x: TTensor) -> TTensor:
    """``composer.gelu``."""
    return _gelu(x)


def attention(query: TTensor, key: TTensor, value: TTensor, heads: int, scale: float) -> TTensor:
    """``composer.attention``."""
    return _attention(query, key, value, num_heads=heads, scale=scale)
