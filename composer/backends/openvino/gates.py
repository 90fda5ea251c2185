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
    """Whether a product reads what two products give, one behind an activation, multiplied.

    Args:
        read: A model as OpenVINO read it.
    """
    return any(map(_is_gate, read.get_ops()))


def _is_gate(node: Any) -> bool:
    if node.get_type_name() != "Multiply":
        return False
    readers = (target.get_node() for target in node.output(0).get_target_inputs())
    is_read = any(reader.get_type_name() == "MatMul" for reader in readers)
    return is_read and all(_comes_of_product(value.get_node()) for value in node.input_values())


def _comes_of_product(node: Any) -> bool:
    """Whether it is a product, or operations on each element lead to it from one."""
    if node.get_type_name() not in _OF_EACH_ELEMENT:
        return bool(node.get_type_name() == "MatMul")
    return any(_comes_of_product(value.get_node()) for value in node.input_values())
