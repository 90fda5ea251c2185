"""What graphs are written in for OpenVINO, before the lowering's own decompositions."""

from __future__ import annotations

from typing import Any

import torch

from composer.lowering.operators.attention import widened_attention
from composer.lowering.operators.entry import Operator, Operators, stays
from composer.lowering.operators.fusions import attention as fused_attention
from composer.lowering.operators.fusions import fusions

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def dialect() -> Operators:
    """ONNX Runtime's fused operators, which OpenVINO's reader knows, and attention in float32.

    In bfloat16 the lowering leaves attention under a mask as it is where torch has arithmetic for
    it. OpenVINO would take it all the same, by a translation that gives NaN for rows of padding.
    """
    return {**fusions(), _ATTENTION: Operator(_attention, in_training=stays)}


def _attention(*args: Any, **kwargs: Any) -> Any:
    one = fused_attention(*args, **kwargs)
    return widened_attention(*args, **kwargs) if one is NotImplemented else one
