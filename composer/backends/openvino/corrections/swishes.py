"""Factors within a swish that are tensors of one element with dimensions.

OpenVINO (2026.4) replaces ``x * sigmoid(x * b)`` by ``Swish`` if ``b`` has one element. It then
rejects ``Swish`` if ``b`` is not a constant and has dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library

_NO_SIZES = numpy.zeros(0, numpy.int64)


def drop_dimensions_of_factors(model: Any) -> None:
    """Reshape a computed one-element factor in the argument of a sigmoid to a scalar.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay the same.
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
    """True if a factor has one element and is not a constant."""
    shape = factor.get_partial_shape()
    computed = factor.get_source_output().get_node().get_type_name() != "Constant"
    return bool(computed and shape.is_static and all(size == 1 for size in shape))


def _rank(factor: Any) -> int:
    rank = factor.get_partial_shape().rank
    return int(rank.get_length()) if rank.is_static else 0
