"""NaN, which OpenVINO's kernels for the CPU turn into a number; this hides faults of a model.

``relu(nan)`` is zero (openvinotoolkit/openvino#35649), and ``exp(nan)`` is infinite (OpenVINO
2026.4). The kernels use a maximum or a minimum, which return the other operand for NaN. ``softmax``
of a row with a NaN is NaN only in that one place, not in the whole row.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library

_OF_EACH_ELEMENT = frozenset(
    {"Relu", "Clamp", "Maximum", "Minimum", "Exp", "HSigmoid", "HardSigmoid"}
)
_ALONG_A_ROW = frozenset({"Softmax", "LogSoftmax"})


def keep_nans(model: Any) -> None:
    """Make operations return NaN where an operand is NaN.

    A chain of element-wise operations gets one check, behind its last operation. The softmax of
    attention is not changed: its product with the values is NaN anyway.

    Args:
        model: A model of OpenVINO's, changed in place.
    """
    opset13 = library.openvino().opset13
    for node in model.get_ordered_ops():
        readers = list(node.output(0).get_target_inputs()) if node.get_output_size() else []
        if node.get_type_name() in _ALONG_A_ROW and not all(map(_multiplies, readers)):
            (x,) = node.input_values()
            zero = opset13.convert_like(opset13.constant(numpy.float32(0)), x)
            nans = opset13.select(opset13.equal(x, x), zero, x)
            axis = opset13.constant(numpy.array([node.get_attributes()["axis"]], numpy.int64))
            kept = opset13.add(node, opset13.reduce_sum(nans, axis, keep_dims=True))
        elif _loses_nans(node) and not all(_loses_nans(each.get_node()) for each in readers):
            x = _operand(node)
            while _loses_nans(x.get_node()):
                x = _operand(x.get_node())
            kept = opset13.select(opset13.equal(x, x), node, x)
        else:
            continue
        for reader in readers:
            reader.replace_source_output(kept.output(0))


def _multiplies(reader: Any) -> bool:
    return bool(reader.get_node().get_type_name() == "MatMul")


def _loses_nans(node: Any) -> bool:
    """True for an element-wise operation that turns NaN of its one operand into a number."""
    if node.get_type_name() not in _OF_EACH_ELEMENT or len(_computed(node)) != 1:
        return False
    return bool(node.get_output_element_type(0).is_real())


def _operand(node: Any) -> Any:
    (x,) = _computed(node)
    return x


def _computed(node: Any) -> list[Any]:
    return [each for each in node.input_values() if not _is_constant(each.get_node())]


def _is_constant(node: Any) -> bool:
    """True for a constant, possibly converted to another dtype or shape."""
    while node.get_type_name() in ("Convert", "ConvertLike", "Reshape", "Unsqueeze"):
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")
