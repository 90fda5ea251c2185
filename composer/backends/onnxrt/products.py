"""Avoid a copy of each transposed weight, as in linear layers without a bias.

In ONNX such a product is a ``Transpose`` and a ``MatMul``. ONNX Runtime 1.32 computes the transpose
when it makes a session (``test_weights_are_still_transposed_when_a_session_is_made``). This makes
one copy of each weight; packing it for the kernel makes another. ONNX Runtime's own operator
``FusedMatMul`` packs the weight directly, without the transpose.

A product with a bias is not changed: the optimizer makes one ``Gemm`` of the product and the bias,
and ``Gemm`` reads the weight directly, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.backends.onnxrt.values import Values, attributes

if TYPE_CHECKING:
    import onnx

DOMAIN = "com.microsoft"


def read_weights_as_they_lie(model: onnx.ModelProto) -> None:
    """Replace each ``MatMul`` of a transposed weight by a ``FusedMatMul`` of the weight itself.

    The ``Transpose`` nodes stay in the model, and nothing reads their results any more.
    """
    import onnx

    values = Values(model)
    for node in model.graph.node:
        weight = _transposed_weight(node, values)
        if weight is not None:
            node.op_type, node.domain, node.input[1] = "FusedMatMul", DOMAIN, weight
            node.attribute.append(onnx.helper.make_attribute("transB", 1))
    if all(each.domain != DOMAIN for each in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))


def _transposed_weight(product: onnx.NodeProto, values: Values) -> str | None:
    """The float32 matrix whose transpose is the second factor of a product without a bias."""
    import onnx

    if product.op_type != "MatMul" or _has_bias(product, values):
        return None
    transpose = values.producer(product.input[1], "Transpose")
    if transpose is None:
        return None
    (weight,) = transpose.input
    dtype, shape = values.types[weight]
    is_matrix = dtype == onnx.TensorProto.FLOAT and len(shape) == 2
    is_reversed = attributes(transpose).get("perm", [1, 0]) == [1, 0]
    return weight if is_matrix and is_reversed and weight in values.initializers else None


def _has_bias(product: onnx.NodeProto, values: Values) -> bool:
    """True if an initializer is added to the product."""
    return any(
        user.op_type == "Add" and not values.initializers.isdisjoint(user.input)
        for user in values.users[product.output[0]]
    )
