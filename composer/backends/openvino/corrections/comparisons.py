"""Comparisons with NaN: OpenVINO (2026.4) returns true for ``nan > x`` and ``nan >= x``."""

from __future__ import annotations

from typing import Any

from composer.backends.openvino import library
from composer.backends.openvino.nodes import nodes_of


def turn_comparisons(model: Any) -> None:
    """Write ``a > b`` as ``b < a``, and ``a >= b`` as ``b <= a``, which is right for NaN."""
    opset13 = library.openvino().opset13
    turned = {"Greater": opset13.less, "GreaterEqual": opset13.less_equal}
    for node in nodes_of(model, turned):
        one, other = node.input_values()
        compare = turned[node.get_type_name()]
        node.output(0).replace(compare(other, one).output(0))
