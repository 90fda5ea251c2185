"""Avoid a copy of each transposed weight, as in linear layers without a bias.

In ONNX such a product is a ``Transpose`` and a ``MatMul``. ONNX Runtime 1.31 computes the transpose
when it makes a session. This makes one copy of each weight; packing it for the kernel makes
another. ONNX Runtime's own operator ``FusedMatMul`` packs the weight directly, without the
transpose.

A product with a bias is not changed: the optimizer makes one ``Gemm`` of the product and the bias,
and ``Gemm`` reads the weight directly, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

DOMAIN = "com.microsoft"


def read_weights_as_they_lie(model: onnx.ModelProto) -> None:
    """Replace each ``MatMul`` of a transposed weight by a ``FusedMatMul`` of the weight itself.

    Args:
        model: A model with its weights as initializers. It is changed in place.
    """
    import onnx

    nodes = model.graph.node
    if any(each.HasField("g") for node in nodes for each in node.attribute):
        return  # a subgraph may read any value
    weights = dict(_transposed_weights(model))
    biased = set(_with_bias(model))
    changed = False
    for node in nodes:
        if node.op_type != "MatMul" or node.output[0] in biased:
            continue
        weight = weights.get(node.input[1])
        if weight is not None:
            node.op_type, node.domain, node.input[1] = "FusedMatMul", DOMAIN, weight
            node.attribute.append(onnx.helper.make_attribute("transB", 1))
            changed = True
    if not changed:
        return
    read = {name for node in nodes for name in node.input}
    read |= {each.name for each in model.graph.output}
    for node in [each for each in nodes if each.output[0] in weights.keys() - read]:
        nodes.remove(node)  # ONNX Runtime would run it, although nothing reads it
    if all(each.domain != DOMAIN for each in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))


def _transposed_weights(model: onnx.ModelProto) -> Iterator[tuple[str, str]]:
    """Names of transposed float32 initializers, each with the name of its initializer."""
    import onnx

    given = model.graph.initializer
    single = (each for each in given if each.data_type == onnx.TensorProto.FLOAT)
    matrices = {each.name for each in single if len(each.dims) == 2}
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.input[0] in matrices:
            order = [number for each in node.attribute for number in each.ints]
            if order in ([1, 0], []):  # by default all dimensions are reversed
                yield node.output[0], node.input[0]


def _with_bias(model: onnx.ModelProto) -> Iterator[str]:
    """Names of values that an initializer is added to."""
    given = {each.name for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Add" and given.intersection(node.input):
            yield from node.input
