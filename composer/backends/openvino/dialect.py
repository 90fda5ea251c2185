"""What graphs are written in for OpenVINO, before the lowering's own decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from composer.lowering.operators.attention import widened_attention
from composer.lowering.operators.fusions import fusions

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def dialect() -> dict[Any, Callable[..., Any]]:
    """ONNX Runtime's fused operators, which OpenVINO's reader knows, and attention in float32.

    In bfloat16 the lowering leaves attention under a mask as it is where torch has arithmetic for
    it. OpenVINO would take it all the same, by a translation that gives NaN for rows of padding.
    """
    found = fusions()
    fused = found[_ATTENTION]

    def attention(*args: Any, **kwargs: Any) -> Any:
        one = fused(*args, **kwargs)
        return widened_attention(*args, **kwargs) if one is NotImplemented else one

    return {**found, _ATTENTION: attention}
