"""Models that OpenVINO must not compute in bfloat16 with one thread.

OpenVINO has a kernel for a gated layer, ``down(activation(gate(x)) * up(x))`` as in Llama, on
processors with AMX tiles for bfloat16. With one thread the process crashes while this kernel is
compiled (OpenVINO 2026.4). Disabling snippets or marking single nodes as precise does not help.
"""

from __future__ import annotations

from typing import Any

_OF_EACH_ELEMENT = {"Sigmoid", "Swish", "Gelu", "Relu", "Tanh", "HSwish", "Elu", "SoftPlus", "Mish"}
_OF_EACH_ELEMENT |= {"Multiply", "Add", "Clamp", "Erf", "Divide", "Convert"}


def has_gate(read: Any) -> bool:
    """True if a product reads the element-wise product of two other products' results.

    There may be element-wise operations, such as an activation, in between.

    Args:
        read: A model as OpenVINO read it.
    """
    products: set[str] = set()  # and what element-wise operations make of them
    for node in read.get_ordered_ops():
        from_products = [
            value.get_node().friendly_name in products for value in node.input_values()
        ]
        kind = node.get_type_name()
        if kind == "Multiply" and all(from_products) and _is_multiplied(node):
            return True
        if kind == "MatMul" or (kind in _OF_EACH_ELEMENT and any(from_products)):
            products.add(node.friendly_name)
    return False


def _is_multiplied(node: Any) -> bool:
    """True if a matrix product reads the node."""
    readers = (target.get_node() for target in node.output(0).get_target_inputs())
    return any(reader.get_type_name() == "MatMul" for reader in readers)
