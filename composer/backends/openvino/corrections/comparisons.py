"""Comparisons with NaN, which OpenVINO takes for greater than, or equal to, any number."""

from __future__ import annotations

from typing import Any

from composer.backends.openvino import library


def turn_comparisons(model: Any) -> None:
    """Ask whether one is less than the other, which is right, not whether that is greater.

    Args:
        model: A model of OpenVINO's, changed in place.
    """
    opset13 = library.openvino().opset13
    turned = {"Greater": opset13.less, "GreaterEqual": opset13.less_equal}
    for node in model.get_ordered_ops():
        if compare := turned.get(node.get_type_name()):
            one, other = node.input_values()
            node.output(0).replace(compare(other, one).output(0))
