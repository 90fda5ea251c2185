"""Slopes of leaky rectifiers, which OpenVINO takes for one for each channel.

It makes ``PRelu`` of ``relu(x) - relu(-x) * slope`` (2026.4), where a slope of one dimension lies
along the second dimension of ``x``, and not along the last as in the product. The numbers are
wrong, or, where the sizes differ, there are none.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library

_SUMS = {"Add", "Subtract"}


def line_up_slopes(model: Any) -> None:
    """Give what multiplies along the last dimension a second one, next to rectified values.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay what they are.
    """
    for node in model.get_ordered_ops():
        read = [value.get_node() for value in node.input_values()]
        is_rectified = any(each.get_type_name() == "Relu" for each in read)
        if node.get_type_name() in _SUMS and is_rectified:
            for each in read:
                _line_up(each)


def _line_up(product: Any) -> None:
    """Do so in a product, and in those that it is a product of."""
    opset13 = library.openvino().opset13
    if product.get_type_name() != "Multiply":
        return
    for factor in product.inputs():
        source = factor.get_source_output()
        _line_up(source.get_node())
        rank = source.get_partial_shape().rank
        if rank.is_static and rank.get_length() == 1 and _rank(product) > 1:
            lined_up = opset13.unsqueeze(source, numpy.array([0]))
            factor.replace_source_output(lined_up.output(0))


def _rank(node: Any) -> int:
    rank = node.get_output_partial_shape(0).rank
    return int(rank.get_length()) if rank.is_static else 0
