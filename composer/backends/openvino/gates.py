"""Models that OpenVINO must not compute in bfloat16 with one thread.

OpenVINO has a kernel for a gated layer, ``down(activation(gate(x)) * up(x))`` as in Llama, on
processors with AMX tiles for bfloat16. With one thread the process crashes while this kernel is
compiled (OpenVINO 2026.4). Disabling snippets or marking single nodes as precise does not help.
"""

from __future__ import annotations

from typing import Any

from composer.backends.openvino.nodes import kinds_of, readers, sources

_OF_EACH_ELEMENT = {"Sigmoid", "Swish", "Gelu", "Relu", "Tanh", "HSwish", "Elu", "SoftPlus", "Mish"}
_OF_EACH_ELEMENT |= {"Multiply", "Add", "Clamp", "Erf", "Divide", "Convert"}


def has_gate(read: Any) -> bool:
    """True if a product reads the element-wise product of two other products' results.

    There may be element-wise operations, such as an activation, in between.
    """
    behind_products: set[str] = set()
    for node in read.get_ordered_ops():
        kind = node.get_type_name()
        from_products = [source.get_name() in behind_products for source in sources(node)]
        is_gated = kind == "Multiply" and all(from_products)
        if is_gated and "MatMul" in kinds_of(readers(node)):
            return True
        is_behind = kind in _OF_EACH_ELEMENT and any(from_products)
        if is_behind or kind == "MatMul":
            behind_products.add(node.get_name())
    return False
