"""Factors within a swish that are vectors of one element.

OpenVINO makes ``Swish`` of ``x * sigmoid(x * b)`` where ``b`` has one element (2026.4), and then
refuses it if ``b`` is no constant and has dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library

_NO_SIZES = numpy.zeros(0, numpy.int64)


def drop_dimensions_of_factors(model: Any) -> None:
    """Give a sigmoid's argument its computed factor of one element as a number.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay what they are.
    """
    opset13 = library.openvino().opset13
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Sigmoid":
            continue
        product = node.input_value(0).get_node()
        if product.get_type_name() != "Multiply":
            continue
        one, other = product.inputs()
        for factor, rest in ((one, other), (other, one)):
            if _is_single(factor) and _rank(rest) >= _rank(factor) > 0:
                number = opset13.reshape(factor.get_source_output(), _NO_SIZES, special_zero=False)
                factor.replace_source_output(number.output(0))


def _is_single(factor: Any) -> bool:
    """Whether it has one element, and is computed."""
    shape = factor.get_partial_shape()
    computed = factor.get_source_output().get_node().get_type_name() != "Constant"
    return bool(computed and shape.is_static and all(size == 1 for size in shape))


def _rank(factor: Any) -> int:
    rank = factor.get_partial_shape().rank
    return int(rank.get_length()) if rank.is_static else 0
