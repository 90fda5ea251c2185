"""Comparisons with NaN: OpenVINO returns true for ``nan > x`` and ``nan >= x``."""

from __future__ import annotations

from typing import Any

from composer.backends.openvino import library


def turn_comparisons(model: Any) -> None:
    """Write ``a > b`` as ``b < a``, and ``a >= b`` as ``b <= a``, which is right for NaN.

    Args:
        model: A model of OpenVINO's, changed in place.
    """
    opset13 = library.openvino().opset13
    turned = {"Greater": opset13.less, "GreaterEqual": opset13.less_equal}
    for node in model.get_ordered_ops():
        if compare := turned.get(node.get_type_name()):
            one, other = node.input_values()
            node.output(0).replace(compare(other, one).output(0))
