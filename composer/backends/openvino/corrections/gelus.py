"""Functions that are almost GELU, which OpenVINO replaces by GELU.

OpenVINO recognises GELU by its constants, and compares them only roughly (2026.4). It replaces
``erf(x / 1.415)`` and ``tanh(0.79 * (x + 0.044715 * x**3))`` by GELU's own functions, with a
relative error of up to 1.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from composer.backends.openvino import library

_ODD = {"Erf", "Tanh"}
_FORMULA = {"Add", "Multiply", "Divide"}
_CONSTANTS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715)
_NEAR, _SAME = 0.05, 1e-5


def tell_from_gelu(model: Any) -> None:
    """Write ``erf(x)`` as ``-erf(-x)``, and ``tanh`` alike, if x is almost a GELU's argument.

    OpenVINO's pattern for GELU then no longer matches, and its wrong fused kernel is not used.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay the same.
    """
    opset13 = library.openvino().opset13
    for node in model.get_ordered_ops():
        if node.get_type_name() in _ODD and any(map(_is_almost, _numbers(node))):
            targets = node.output(0).get_target_inputs()
            node.input(0).replace_source_output(opset13.negative(node.input_value(0)).output(0))
            negated = opset13.negative(node).output(0)
            for target in targets:
                target.replace_source_output(negated)


def _is_almost(number: float) -> bool:
    """True if a number is near a constant of GELU, but not equal up to rounding."""
    return any(_SAME < abs(number / each - 1) < _NEAR for each in _CONSTANTS)


def _numbers(node: Any) -> Iterator[float]:
    """Yield the one-element constants in the sums, products and quotients that a node reads."""
    found, known = [node], set[str]()
    while found:
        for value in found.pop().input_values():
            source = value.get_node()
            kind = source.get_type_name()
            if kind == "Constant" and math.prod(source.get_output_shape(0)) == 1:
                yield float(source.get_data().item())
            elif kind in _FORMULA and source.friendly_name not in known:
                known.add(source.friendly_name)
                found.append(source)
