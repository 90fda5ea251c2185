"""Constants with one element per channel (dimension 1), which OpenVINO reads along the last one.

OpenVINO (2026.4) fuses element-wise operations into the matrix product before them. It does so
where the product has a constant weight, a result of four or more dimensions, and no bias. Such a
product is called a layer here. A constant of a fused operation may have one element for each index
of dimension 1 (the channels of a convolution). The fused kernel reads it along the last dimension.
The numbers are then wrong; if the two sizes differ, OpenVINO fails instead. With dynamic sizes this
affects most operations; with fixed sizes it affects the slopes of ``PRelu``.

A layer whose last dimension has one element is not changed, because repeating the constant along
that dimension would not change its shape. If OpenVINO cannot compile it, the attempt fails with a
reason.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy

from composer.backends.openvino import library
from composer.backends.openvino.nodes import (
    insert_behind,
    rank_of,
    reachable,
    readers,
    redirect,
    sizes_of,
    sources,
)

_NORM = "BatchNormInference"

_ELEMENT_BY_ELEMENT = frozenset(
    {"Add", "Subtract", "Multiply", "Divide", "PRelu", "Power", "SquaredDifference"}
    | {"Maximum", "Minimum", "Mod", "FloorMod", _NORM}
    | {"Relu", "Gelu", "Sigmoid", "Tanh", "Clamp", "Elu", "HSwish", "HSigmoid", "HardSigmoid"}
    | {"Mish", "Swish", "SoftPlus", "SoftSign", "Selu", "Abs", "Negative", "Sqrt", "Exp", "Log"}
    | {"Erf", "Round", "Floor", "Ceiling", "Sin", "Cos", "Sign", "Convert"}
)
"""Operations that OpenVINO may fuse. Those without a constant hand the fusion on to the next."""


def widen_channels(model: Any) -> None:
    """Repeat such constants along the last dimension; OpenVINO does not fuse that shape."""
    nodes = model.get_ordered_ops()
    constants = _constants(nodes)
    for node in nodes:
        if _is_layer(node, constants):
            width = sizes_of(node.output(0))[-1]
            for reader in list(reachable(node, _elementwise_readers)):
                _remove_channel_operands(reader, width, constants)


def _constants(nodes: Sequence[Any]) -> set[str]:
    """Return the names of constants, and of nodes that are computed from constants only."""
    names = set[str]()
    for node in nodes:
        operands = {source.get_name() for source in sources(node)}
        is_folded = bool(operands) and operands <= names
        if is_folded or node.get_type_name() == "Constant":
            names.add(node.get_name())
    return names


def _is_layer(node: Any, constants: Container[str]) -> bool:
    """True for a product with a constant matrix, of 4+ dimensions and several outputs."""
    if node.get_type_name() != "MatMul" or node.get_name() in constants:
        return False
    weight, sizes = node.input_value(1), sizes_of(node.output(0))
    if weight.get_node().get_name() not in constants:
        return False
    return rank_of(weight) == 2 and len(sizes) > 3 and sizes[-1] > 1


def _elementwise_readers(node: Any) -> list[Any]:
    return [reader for reader in readers(node) if reader.get_type_name() in _ELEMENT_BY_ELEMENT]


def _remove_channel_operands(node: Any, width: int, constants: Container[str]) -> None:
    """Rewrite one element-wise operation so that no operand has one element per channel."""
    kind = node.get_type_name()
    if kind == "PRelu":
        insert_behind(node, _rectified)
    elif kind == _NORM:
        _spell_out(node, width)
    else:
        for operand in node.inputs():
            if operand.get_source_output().get_node().get_name() in constants:
                _widen(operand, width)


def _rectified(node: Any) -> Any:
    """Return a leaky rectifier as a choice between its input and a product."""
    opset13 = library.openvino().opset13
    x, slopes = node.input_values()
    zero = opset13.constant(0, dtype=x.get_element_type())
    return opset13.select(opset13.greater(x, zero), x, opset13.multiply(x, slopes))


def _spell_out(norm: Any, width: int) -> None:
    """Replace a batch norm, whose parameters are per channel, by a product and a sum."""
    opset13 = library.openvino().opset13
    x, gain, shift, mean, variance = norm.input_values()
    epsilon = opset13.constant(norm.get_attributes()["epsilon"], dtype=variance.get_element_type())
    scale = opset13.divide(gain, opset13.sqrt(opset13.add(variance, epsilon)))
    moved = opset13.subtract(shift, opset13.multiply(mean, scale))
    column = numpy.array([-1] + [1] * (len(sizes_of(x)) - 2))
    product = opset13.multiply(x, opset13.reshape(scale, column, special_zero=False))
    total = opset13.add(product, opset13.reshape(moved, column, special_zero=False))
    redirect(norm.output(0).get_target_inputs(), total)
    for node in (product, total):
        _widen(node.input(1), width)


def _widen(operand: Any, width: int) -> None:
    """Repeat an operand along the last dimension if it varies along dimension 1 and not the last.

    Operands are aligned at the last dimension, so dimension 1 of the result may be dimension 0 of
    an operand, or not be among its dimensions.
    """
    value = operand.get_source_output()
    sizes, rank = sizes_of(value), len(sizes_of(operand.get_node().output(0)))
    channel = len(sizes) - (rank - 1)
    if channel >= 0 and sizes[channel] > 1 and sizes[-1] == 1:
        wide = numpy.array([*sizes[:-1], width])
        redirect([operand], library.openvino().opset13.broadcast(value, wide))
