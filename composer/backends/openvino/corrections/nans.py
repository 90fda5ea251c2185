"""NaN, which OpenVINO's kernels for the CPU turn into a number; this hides faults of a model.

``relu(nan)`` is zero (openvinotoolkit/openvino#35649), and ``exp(nan)`` is infinite (OpenVINO
2026.4). The kernels use a maximum or a minimum, which return the other operand for NaN. ``softmax``
of a row with a NaN is NaN only in that one place, not in the whole row.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy

from composer.backends.openvino import library
from composer.backends.openvino.nodes import (
    constant_of,
    insert_behind,
    kinds_of,
    nodes_of,
    reachable,
    readers,
    redirect,
    sources,
)

_OF_EACH_ELEMENT = frozenset(
    {"Relu", "Clamp", "Maximum", "Minimum", "Exp", "HSigmoid", "HardSigmoid"}
)
_ALONG_A_ROW = frozenset({"Softmax", "LogSoftmax"})


def keep_nans(model: Any) -> None:
    """Make operations return NaN where an operand is NaN.

    A chain of element-wise operations gets one check, behind its last operation. The softmax of
    attention is not changed: its product with the values is NaN anyway.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() in _ALONG_A_ROW:
            if set(kinds_of(readers(node))) != {"MatMul"}:
                insert_behind(node, _with_nans_of_the_row)
        elif _loses_nans(node) and not all(map(_loses_nans, readers(node))):
            insert_behind(node, _with_nans_of_the_operand)


def drop_checks(model: Any) -> None:
    """Remove the check of a maximum pool for NaN where it reads ``Relu``, which returns none.

    In the shared translation a mean pool over the same windows tells where NaN is.
    """
    for node in nodes_of(model, {"Select"}):
        check, _, pooled = sources(node)
        checked = itertools.islice(reachable(check, lambda each: sources(each)[:1]), 2)
        if kinds_of([pooled, check, *checked]) == ["MaxPool", "IsNaN", "AvgPool", "Relu"]:
            redirect(node.output(0).get_target_inputs(), pooled)


def _with_nans_of_the_row(node: Any) -> Any:
    """Return the node plus a sum for each row: NaN if an element is NaN, else zero."""
    opset13 = library.openvino().opset13
    (x,) = node.input_values()
    zero = opset13.convert_like(opset13.constant(numpy.float32(0)), x)
    nans = opset13.select(opset13.equal(x, x), zero, x)
    axis = opset13.constant(numpy.array([node.get_attributes()["axis"]], numpy.int64))
    return opset13.add(node, opset13.reduce_sum(nans, axis, keep_dims=True))


def _with_nans_of_the_operand(node: Any) -> Any:
    """Return the node's value, or the operand of its chain where that is NaN."""
    opset13 = library.openvino().opset13
    first = node
    while _loses_nans(first):
        (x,) = _computed(first)
        first = x.get_node()
    return opset13.select(opset13.equal(x, x), node, x)


def _loses_nans(node: Any) -> bool:
    """True for an element-wise operation that turns NaN of its one operand into a number."""
    if node.get_type_name() not in _OF_EACH_ELEMENT or len(_computed(node)) != 1:
        return False
    return bool(node.get_output_element_type(0).is_real())


def _computed(node: Any) -> list[Any]:
    return [value for value in node.input_values() if constant_of(value.get_node()) is None]
