"""Functions that are almost GELU, which OpenVINO takes for it.

It knows GELU written out by its constants, and by those only roughly (2026.4): ``erf(x / 1.415)``
and ``tanh(0.79 * (x + 0.044715 * x**3))`` are computed with GELU's own, off by as much as 1.5 %.
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
    """Compute odd functions of what is almost GELU's argument from the negated argument.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay what they are.
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
    """Whether it is near a constant of GELU's, farther from it than as one may write it."""
    return any(_SAME < abs(number / each - 1) < _NEAR for each in _CONSTANTS)


def _numbers(node: Any) -> Iterator[float]:
    """The constants of one element in what sums, products and quotients a node reads."""
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
