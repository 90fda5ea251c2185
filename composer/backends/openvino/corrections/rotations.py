"""Rotary embeddings, which OpenVINO computes by a kernel of its own.

It takes ``x * a + cat(-x2, x1) * b`` for one, whatever ``a`` and ``b`` are (2026.4). The kernel
reads as many of each as a row of ``x`` has, also where there is one for all of the row, and what
lies behind it in memory becomes part of the result, or ends the process.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy

_SUMS = {"Add", "Subtract"}
_PRODUCTS = {"Multiply", "Divide"}
_ROTATED = "Concat"


def widen_factors(model: Any) -> None:
    """Repeat what multiplies a rotated row as a whole, so that there is one for each element.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay what they are.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() not in _SUMS:
            continue
        products = _products(node)
        read = (value for each in products for value in each.input_values())
        if any(value.get_node().get_type_name() == _ROTATED for value in read):
            for product in products:
                _widen(product)
    model.validate_nodes_and_infer_types()


def _products(node: Any) -> list[Any]:
    """The products that a sum adds up, and those that they are products of."""
    found, known = [node], dict[str, Any]()
    while found:
        for value in found.pop().input_values():
            product = value.get_node()
            name = product.friendly_name
            if product.get_type_name() in _PRODUCTS and name not in known:
                known[name] = product
                found.append(product)
    return list(known.values())


def _widen(product: Any) -> None:
    """Repeat whichever factor has one element for a row of the other."""
    from openvino import opset13

    for narrow, wide in itertools.permutations(product.inputs()):
        if _width(narrow) == 1 and _width(wide) != 1:
            source, other = narrow.get_source_output(), wide.get_source_output()
            sizes = opset13.shape_of(other)
            row = opset13.gather(sizes, numpy.array([-1]), numpy.array(0))
            ones = numpy.ones(max(source.get_partial_shape().rank.get_length() - 1, 0), numpy.int64)
            repeats = opset13.concat([opset13.constant(ones), row], 0) if ones.size else row
            narrow.replace_source_output(opset13.tile(source, repeats).output(0))


def _width(factor: Any) -> int | None:
    """How many elements a row has; ``None`` where that is not known."""
    shape = factor.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    if not shape.rank.get_length():
        return 1
    return None if shape[-1].is_dynamic else int(shape[-1].get_length())
