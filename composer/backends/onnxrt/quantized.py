"""Keep ONNX Runtime from computing the softmax of quantized numbers with integers.

Its optimizer makes one integer kernel of ``DequantizeLinear``, an operator and ``QuantizeLinear``.
For most operators the kernel gives eager's integers. That for ``Softmax`` (ONNX Runtime 1.32) is
off by one step in up to a quarter of them
(``test_roundings_are_still_left_out``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.backends.onnxrt.values import Values

if TYPE_CHECKING:
    import onnx


def compute_softmax_in_floats(model: onnx.ModelProto) -> None:
    """Put a ``Sum`` of one operand, which changes nothing, behind the softmax of such numbers."""
    import onnx

    values, nodes = Values(model), []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type == "Softmax" and values.producer(node.input[0], "DequantizeLinear"):
            result = node.output[0]
            node.output[0] = f"{result}_in_floats"
            nodes.append(onnx.helper.make_node("Sum", [node.output[0]], [result]))
    # A protobuf copies what it is given, so the nodes are copied before they are deleted.
    changed = onnx.GraphProto(node=nodes)
    del model.graph.node[:]
    model.graph.node.extend(changed.node)
