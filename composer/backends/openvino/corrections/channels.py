"""Constants with one element per channel that OpenVINO reads as one element per output of a layer.

OpenVINO (2026.4) fuses element-wise operations into the matrix product before them. It does so
where the product has a constant weight, a result of four or more dimensions, and no bias. A
constant of such an operation may have one element for each index of dimension 1 (the channels of a
convolution). The fused kernel reads it along the last dimension, which holds the outputs of the
layer. The numbers are then wrong; if the two sizes differ, OpenVINO fails instead. With dynamic
sizes this affects most operations; with fixed sizes it affects the slopes of ``PRelu``.

A layer with one output is not changed. If OpenVINO cannot compile it, the attempt fails with a
reason.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy

from composer.backends.openvino import library

_NORM = "BatchNormInference"

_ELEMENT_BY_ELEMENT = frozenset(
    {"Add", "Subtract", "Multiply", "Divide", "PRelu", "Power", "SquaredDifference"}
    | {"Maximum", "Minimum", "Mod", "FloorMod", _NORM}
    | {"Relu", "Gelu", "Sigmoid", "Tanh", "Clamp", "Elu", "HSwish", "HSigmoid", "HardSigmoid"}
    | {"Mish", "Swish", "SoftPlus", "SoftSign", "Selu", "Abs", "Negative", "Sqrt", "Exp", "Log"}
    | {"Erf", "Round", "Floor", "Ceiling", "Sin", "Cos", "Sign", "Convert"}
)


def widen_channels(model: Any) -> None:
    """Repeat such constants along the last dimension; OpenVINO does not fuse that shape.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay the same.
    """
    nodes = model.get_ordered_ops()
    constants = _constants(nodes)
    for node in nodes:
        if _is_layer(node, constants):
            width = _sizes(node.output(0))[-1]
            for reader in list(_behind(node)):
                _part_from_channels(reader, width, constants)


def _constants(nodes: Sequence[Any]) -> set[str]:
    """Return the names of constants, and of nodes that are computed from constants only."""
    found = set[str]()
    for node in nodes:
        given = [value.get_node().get_name() for value in node.input_values()]
        if node.get_type_name() == "Constant" or (given and found.issuperset(given)):
            found.add(node.get_name())
    return found


def _is_layer(node: Any, constants: Container[str]) -> bool:
    """True for a product with a constant matrix, of 4+ dimensions and several outputs."""
    if node.get_type_name() != "MatMul" or node.get_name() in constants:
        return False
    weight, sizes = node.input_value(1), _sizes(node.output(0))
    is_constant = weight.get_node().get_name() in constants
    return is_constant and len(_sizes(weight)) == 2 and len(sizes) > 3 and sizes[-1] > 1


def _behind(node: Any) -> Iterator[Any]:
    """Yield the element-wise operations that follow a node, directly or behind one another."""
    seen, found = set[str](), [node]
    while found:
        for target in found.pop().output(0).get_target_inputs():
            reader = target.get_node()
            name, kind = reader.get_name(), reader.get_type_name()
            if name not in seen and kind in _ELEMENT_BY_ELEMENT:
                seen.add(name)
                found.append(reader)
                yield reader


def _part_from_channels(node: Any, width: int, constants: Container[str]) -> None:
    """Rewrite one element-wise operation so that no operand has one element per channel."""
    opset13, kind = library.openvino().opset13, node.get_type_name()
    if kind == "PRelu":
        x, slopes = node.input_values()
        zero = opset13.constant(0, dtype=x.get_element_type())
        _replace(node, opset13.select(opset13.greater(x, zero), x, opset13.multiply(x, slopes)))
    elif kind == _NORM:
        _spell_out(node, width)
    else:
        for operand in node.inputs():
            if operand.get_source_output().get_node().get_name() in constants:
                _widen(operand, width)


def _spell_out(norm: Any, width: int) -> None:
    """Replace a batch norm, whose parameters are per channel, by a product and a sum."""
    opset13 = library.openvino().opset13
    x, gain, shift, mean, variance = norm.input_values()
    epsilon = opset13.constant(norm.get_attributes()["epsilon"], dtype=variance.get_element_type())
    scale = opset13.divide(gain, opset13.sqrt(opset13.add(variance, epsilon)))
    moved = opset13.subtract(shift, opset13.multiply(mean, scale))
    column = numpy.array([-1, *(1 for _ in _sizes(x)[2:])])
    scale, moved = (opset13.reshape(each, column, special_zero=False) for each in (scale, moved))
    product = opset13.multiply(x, scale)
    total = opset13.add(product, moved)
    _replace(norm, total)
    for node in (product, total):
        _widen(node.input(1), width)


def _replace(node: Any, by: Any) -> None:
    for target in node.output(0).get_target_inputs():
        target.replace_source_output(by.output(0))


def _widen(operand: Any, width: int) -> None:
    """Repeat an operand along the last dimension if it varies along dimension 1 only."""
    value = operand.get_source_output()
    sizes, rank = _sizes(value), len(_sizes(operand.get_node().output(0)))
    place = 1 - rank + len(sizes)
    if place >= 0 and sizes[place] > 1 and sizes[-1] == 1:
        wide = numpy.array([*sizes[:-1], width])
        operand.replace_source_output(library.openvino().opset13.broadcast(value, wide).output(0))


def _sizes(value: Any) -> list[int]:
    """Return the size of each dimension, -1 if it is dynamic; an empty list if the rank is."""
    shape = value.get_partial_shape()
    if shape.rank.is_dynamic:
        return []
    return [-1 if each.is_dynamic else int(each.get_length()) for each in shape]
