"""Slopes of leaky rectifiers, which OpenVINO reads as one slope per channel.

OpenVINO (2026.4) replaces ``relu(x) - relu(-x) * slope`` by ``PRelu``. In ``PRelu`` a slope of one
dimension lies along the second dimension of ``x``; in the product it lies along the last. The
numbers are wrong; if the sizes differ, OpenVINO fails instead.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library
from composer.backends.openvino.nodes import (
    SUMS,
    kinds_of,
    nodes_of,
    rank_of,
    redirect,
    sources,
)


def line_up_slopes(model: Any) -> None:
    """Give one-dimensional factors in a sum with ``relu`` a leading dimension of size one."""
    for total in nodes_of(model, SUMS):
        terms = sources(total)
        if "Relu" in kinds_of(terms):
            for term in terms:
                _line_up(term)


def _line_up(product: Any) -> None:
    """Change the factors of a product, and of the products that are its factors."""
    opset13 = library.openvino().opset13
    if product.get_type_name() != "Multiply":
        return
    is_vector = rank_of(product.output(0)) in (None, 1)
    for factor in product.inputs():
        value = factor.get_source_output()
        _line_up(value.get_node())
        if rank_of(value) == 1 and not is_vector:
            redirect([factor], opset13.unsqueeze(value, numpy.array([0])))
