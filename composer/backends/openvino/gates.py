"""Which models OpenVINO must not compute in bfloat16 by one thread.

It has a kernel for a gated layer, ``down(activation(gate(x)) * up(x))``, as Llama's, on processors
with tiles for bfloat16 (AMX). Made for one thread it ends the process while it is compiled
(2026.4), whatever is set of snippets and of the precision of single nodes.
"""

from __future__ import annotations

from typing import Any

_OF_EACH_ELEMENT = {"Sigmoid", "Swish", "Gelu", "Relu", "Tanh", "HSwish", "Elu", "SoftPlus", "Mish"}
_OF_EACH_ELEMENT |= {"Multiply", "Add", "Clamp", "Erf", "Divide", "Convert"}


def has_gate(read: Any) -> bool:
    """Whether a product reads what two others give, multiplied, behind an activation or not.

    Args:
        read: A model as OpenVINO read it.
    """
    products: set[str] = set()  # and what operations on each element make of them
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
    """Whether a product reads it."""
    readers = (target.get_node() for target in node.output(0).get_target_inputs())
    return any(reader.get_type_name() == "MatMul" for reader in readers)
