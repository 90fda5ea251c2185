"""Products with weights that are read transposed, as those of linear layers without a bias are.

ONNX says such a product by a ``Transpose`` and a ``MatMul``. ONNX Runtime (1.31) computes the
transpose when it makes a session: a copy of each weight, before the one that it packs for its
kernel. Its own operator ``FusedMatMul`` packs the weight from where it lies. A product with a bias
is left alone: the optimizer makes one ``Gemm`` of both, which reads the weight as it lies, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

DOMAIN = "com.microsoft"


def read_weights_as_they_lie(model: onnx.ModelProto) -> None:
    """Have ``FusedMatMul`` read each weight that ``MatMul`` is given the transpose of, in place.

    Args:
        model: With its weights as initializers.
    """
    import onnx

    nodes = model.graph.node
    if any(each.HasField("g") for node in nodes for each in node.attribute):
        return  # a graph within, which may read any value
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
        nodes.remove(node)  # ONNX Runtime runs what nobody reads
    if all(each.domain != DOMAIN for each in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))


def _transposed_weights(model: onnx.ModelProto) -> Iterator[tuple[str, str]]:
    """Names of transposes of float32 matrices among the initializers, with theirs."""
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
