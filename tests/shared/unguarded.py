"""ONNX Runtime without composer's refusal of one operator that it computes wrongly."""

from __future__ import annotations

from typing import Any

import torch

from composer.backends.onnxrt import OnnxRuntimeEngine
from composer.lowering.operators.entry import Operator, Operators

aten = torch.ops.aten


class Unguarded(OnnxRuntimeEngine):
    """Takes powers of integers, which saturate in ONNX Runtime and wrap in torch."""

    has_self_test = False

    def operators(self) -> Operators:
        """Return the entries without that of powers."""
        return {**super().operators(), aten.pow: Operator()}

    def why_not(self, node: torch.fx.Node, build: Any) -> str | None:
        """Return no reason for a power."""
        return None if node.target is aten.pow.Tensor_Scalar else super().why_not(node, build)
