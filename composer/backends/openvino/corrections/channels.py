"""Operands for each channel behind a linear layer, which OpenVINO lays along the last dimension.

A product with a constant, of four dimensions and more and without a bias, computes what follows it
element by element in the same kernel (2026.4). A constant there that has one element for each index
of dimension 1, the channels of a convolution, is taken for one of the layer's own outputs, which
are the last dimension: the numbers are wrong, or, where the two sizes differ, there are none. With
sizes that vary that is so for most operands; with fixed ones for the slopes of ``PRelu``.

A layer with one output is left as it is: where it cannot be built, that is a failure with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy

from composer.backends.openvino import library

_NORM = "BatchNormInference"

_BINARY = frozenset(
    {"Add", "Subtract", "Multiply", "Divide", "PRelu", "Power", "SquaredDifference"}
    | {"Maximum", "Minimum", "Mod", "FloorMod"}
)
_UNARY = frozenset(
    {"Relu", "Gelu", "Sigmoid", "Tanh", "Clamp", "Elu", "HSwish", "HSigmoid", "HardSigmoid"}
    | {"Mish", "Swish", "SoftPlus", "SoftSign", "Selu", "Abs", "Negative", "Sqrt", "Exp", "Log"}
    | {"Erf", "Round", "Floor", "Ceiling", "Sin", "Cos", "Sign", "Convert"}
)


def widen_channels(model: Any) -> None:
    """Give such an operand the size of the last dimension, which no kernel of a layer takes.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay what they are.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and _rank(node.output(0)) > 3 and _is_layer(node):
            for reader in list(_behind(node)):
                if reader.get_type_name() == _NORM:
                    _spell_out_norm(reader)
                elif reader.get_type_name() == "PRelu":
                    _spell_out_slopes(reader)
                else:
                    _widen(reader)


def _is_layer(product: Any) -> bool:
    x, weight = product.input_values()
    return _is_constant(weight) and _rank(weight) == 2 and not _is_constant(x)


def _behind(node: Any) -> Iterator[Any]:
    """What follows element by element."""
    seen, found = set[str](), [node]
    while found:
        for target in found.pop().output(0).get_target_inputs():
            reader = target.get_node()
            name, kind = reader.get_friendly_name(), reader.get_type_name()
            if name not in seen and (kind in _BINARY | _UNARY or kind == _NORM):
                seen.add(name)
                found.append(reader)
                yield reader


def _spell_out_slopes(node: Any) -> None:
    opset13 = library.openvino().opset13
    x, slopes = node.input_values()
    zero = opset13.constant(0, dtype=x.get_element_type())
    _replace(node, opset13.select(opset13.greater(x, zero), x, opset13.multiply(x, slopes)))


def _spell_out_norm(node: Any) -> None:
    opset13 = library.openvino().opset13
    x, gain, shift, mean, variance = node.input_values()
    epsilon = opset13.constant(node.get_attributes()["epsilon"], dtype=variance.get_element_type())
    scale = opset13.divide(gain, opset13.sqrt(opset13.add(variance, epsilon)))
    moved = opset13.subtract(shift, opset13.multiply(mean, scale))
    column = numpy.array([-1, *(1 for _ in range(_rank(x) - 2))])
    scale, moved = (opset13.reshape(each, column, special_zero=False) for each in (scale, moved))
    product = opset13.multiply(x, scale)
    total = opset13.add(product, moved)
    _replace(node, total)
    _widen(product)
    _widen(total)


def _replace(node: Any, by: Any) -> None:
    for target in node.output(0).get_target_inputs():
        target.replace_source_output(by.output(0))


def _widen(node: Any) -> None:
    opset13 = library.openvino().opset13
    out = node.output(0)
    for operand in node.inputs():
        value = operand.get_source_output()
        if _is_constant(value) and _lies_along_channels(value, _rank(out)):
            sizes = [*value.get_shape()[:-1], _width(out)]
            operand.replace_source_output(opset13.broadcast(value, numpy.array(sizes)).output(0))


def _lies_along_channels(value: Any, rank: int) -> bool:
    """Whether an operand has several elements in dimension 1, and one in the last."""
    shape = value.get_shape()
    place = 1 - rank + len(shape)
    return place >= 0 and shape[place] > 1 and shape[-1] == 1


def _is_constant(value: Any) -> bool:
    """Whether it is made of constants alone."""
    node = value.get_node()
    if node.get_type_name() == "Constant":
        return True
    given = node.input_values()
    return bool(given) and all(map(_is_constant, given))


def _width(value: Any) -> int:
    return int(value.get_partial_shape()[-1].get_length())


def _rank(value: Any) -> int:
    rank = value.get_partial_shape().rank
    return int(rank.get_length()) if rank.is_static else 0
