"""Factors within a swish that are tensors of one element with dimensions.

OpenVINO (2026.4) replaces ``x * sigmoid(x * b)`` by ``Swish`` if ``b`` has one element. It then
rejects ``Swish`` if ``b`` is not a constant and has dimensions.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy

from composer.backends.openvino import library
from composer.backends.openvino.nodes import nodes_of, redirect, sizes_of, sources

_NO_SIZES = numpy.zeros(0, numpy.int64)


def drop_dimensions_of_factors(model: Any) -> None:
    """Reshape a computed one-element factor in the argument of a sigmoid to a scalar."""
    reshape = library.openvino().opset13.reshape
    for sigmoid in nodes_of(model, {"Sigmoid"}):
        (product,) = sources(sigmoid)
        if product.get_type_name() != "Multiply":
            continue
        for factor, other in itertools.permutations(product.inputs()):
            if _is_single(factor) and len(sizes_of(other)) >= len(sizes_of(factor)):
                number = reshape(factor.get_source_output(), _NO_SIZES, special_zero=False)
                redirect([factor], number)


def _is_single(factor: Any) -> bool:
    """True if a factor has dimensions, all of size one, and is not a constant."""
    source = factor.get_source_output().get_node()
    return source.get_type_name() != "Constant" and set(sizes_of(factor)) == {1}
