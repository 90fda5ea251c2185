"""Functions that are almost GELU, which OpenVINO replaces by GELU.

OpenVINO recognises GELU by its constants, and compares them only roughly (2026.4). It replaces
``erf(x / 1.415)`` and ``tanh(0.79 * (x + 0.044715 * x**3))`` by GELU's own functions, with a
relative error of up to 1.5 %.
"""

from __future__ import annotations

import math
from typing import Any

from composer.backends.openvino import library
from composer.backends.openvino.nodes import insert_behind, nodes_of, reachable, redirect, sources

_ODD = {"Erf", "Tanh"}
_FORMULA = {"Add", "Multiply", "Divide"}
_CONSTANTS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715)
_NEAR, _SAME = 0.05, 1e-5


def tell_from_gelu(model: Any) -> None:
    """Write ``erf(x)`` as ``-erf(-x)``, and ``tanh`` alike, if x is almost a GELU's argument.

    OpenVINO's pattern for GELU then no longer matches, and its wrong fused kernel is not used.
    """
    negative = library.openvino().opset13.negative
    for node in nodes_of(model, _ODD):
        formula = reachable(node, sources, lambda source: source.get_type_name() in _FORMULA)
        if any(map(_is_almost_of_gelu, formula)):
            redirect([node.input(0)], negative(node.input_value(0)))
            insert_behind(node, negative)


def _is_almost_of_gelu(node: Any) -> bool:
    """True for a number near a constant of GELU, but not equal to it up to rounding."""
    if node.get_type_name() != "Constant" or node.data.size != 1:
        return False
    number = float(node.data.item())
    return any(_SAME < abs(number / constant - 1) < _NEAR for constant in _CONSTANTS)
