"""Slopes of leaky rectifiers, which OpenVINO reads as one slope per channel.

OpenVINO (2026.4) replaces ``relu(x) - relu(-x) * slope`` by ``PRelu``. In ``PRelu`` a slope of one
dimension lies along the second dimension of ``x``; in the product it lies along the last. The
numbers are wrong; if the sizes differ, OpenVINO fails instead.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library

_SUMS = {"Add", "Subtract"}


def line_up_slopes(model: Any) -> None:
    """Give one-dimensional factors in a sum with ``relu`` a second, leading dimension of size one.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay the same.
    """
    for node in model.get_ordered_ops():
        read = [value.get_node() for value in node.input_values()]
        is_rectified = any(each.get_type_name() == "Relu" for each in read)
        if node.get_type_name() in _SUMS and is_rectified:
            for each in read:
                _line_up(each)


def _line_up(product: Any) -> None:
    """Change the factors of a product, and of the products that are its factors."""
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
