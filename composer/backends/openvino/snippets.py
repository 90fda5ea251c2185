"""Models that OpenVINO must not compile in *snippets*, its kernels of several operations.

OpenVINO 2026.4 makes three kinds of them wrongly:

- Sequences of products of two dimensions. OpenVINO fuses the operations behind a product into the
  kernel. For a difference, a quotient or a power with a second operand the process crashes during
  compilation; OpenVINO rejects ``Mish``.
- Attention with transposed queries. The kernel reads the queries in place, and may write its result
  over them, because it assumes that both have the same size. If the transpose does not change the
  shape (as many queries as heads), rows are overwritten before they are read, and the numbers are
  wrong.
- Attention whose result is combined with a computed operand, and then divided by or normalized with
  the sums of its rows. The process crashes during compilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

SEPARATE = {"SNIPPETS_MODE": "DISABLE"}
"""The property that makes OpenVINO compile each operation by itself, as it did before snippets.

The engine also sets it where OpenVINO cannot make a kernel: a long chain of operations may need
more registers than there are.
"""

_TAKEN_WRONGLY = {"Subtract", "Divide", "Power", "SquaredDifference", "Mod", "FloorMod"}
_LENGTH, _RANK = 2, 2
_PRODUCTS = {"MatMul", "ScaledDotProductAttention"}
_MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze"}


def config_for(read: Any) -> Mapping[str, str]:
    """Return the properties that a model needs; empty unless a kernel for it would be wrong.

    Args:
        read: A model as OpenVINO read it.
    """
    nodes = read.get_ops()
    is_wrong = _breaks_a_sequence(nodes) or any(map(_is_overwritten, nodes))
    return SEPARATE if is_wrong or any(map(_is_normalized, nodes)) else {}


def _breaks_a_sequence(nodes: list[Any]) -> bool:
    flat = [node for node in nodes if _is_flat(node)]
    products = sum(node.get_type_name() == "MatMul" for node in flat)
    return products >= _LENGTH and any(map(_breaks, flat))


def _is_flat(node: Any) -> bool:
    """True if a node returns floating-point values in at most two dimensions."""
    if node.get_output_size() != 1 or not node.get_output_element_type(0).is_real():
        return False
    rank = node.get_output_partial_shape(0).rank
    return bool(rank.is_static and rank.get_length() <= _RANK)


def _breaks(node: Any) -> bool:
    kind = node.get_type_name()
    by_number = any(map(_is_number, node.inputs()))
    return kind == "Mish" or (kind in _TAKEN_WRONGLY and not by_number)


def _is_number(read: Any) -> bool:
    """True if an operand is a constant of one element."""
    source = read.get_source_output().get_node()
    elements = math.prod(source.get_output_shape(0)) if source.get_type_name() == "Constant" else 0
    return elements == 1


def _is_overwritten(node: Any) -> bool:
    """True for a transpose that does not change the shape, and whose result a product reads."""
    if node.get_type_name() != "Transpose":
        return False
    shape = node.get_output_partial_shape(0)
    if shape.rank.is_dynamic or node.get_input_partial_shape(0) != shape:
        return False
    is_flat = shape.rank.get_length() <= _RANK
    return not is_flat and any(each.get_type_name() in _PRODUCTS for each in _readers(node))


def _is_normalized(node: Any) -> bool:
    """True for attention whose result is combined with an operand, then reduced."""
    readers = _readers(node)
    if node.get_type_name() == "Softmax":
        return any(each.get_type_name() == "MatMul" and _is_reduced(each) for each in readers)
    return node.get_type_name() == "ScaledDotProductAttention" and _is_reduced(node)


def _is_reduced(attention: Any) -> bool:
    """True if the result of attention is combined with a computed operand, then reduced."""
    combined = filter(_combines, _readers(attention))
    return any(_reduces(reader) for each in combined for reader in _readers(each))


def _combines(node: Any) -> bool:
    is_elementwise = node.get_type_name() not in _PRODUCTS | _MOVES
    return is_elementwise and sum(map(_is_computed, node.input_values())) > 1


def _reduces(node: Any) -> bool:
    kind = node.get_type_name()
    return bool(kind == "MVN" or kind.startswith("Reduce"))


def _is_computed(value: Any) -> bool:
    return value.get_node().get_type_name() not in {"Constant", "Parameter"}


def _readers(node: Any) -> Iterator[Any]:
    """Yield the users of a node, also behind element-wise operations and moves.

    The search stops at products: they are yielded, but their users are not.
    """
    shape = node.get_output_partial_shape(0)
    found, known = [node], {node.friendly_name}
    while found:
        for target in found.pop().output(0).get_target_inputs():
            reader = target.get_node()
            if reader.friendly_name not in known:
                known.add(reader.friendly_name)
                yield reader
                if _hands_on(reader, shape):
                    found.append(reader)


def _hands_on(node: Any, shape: Any) -> bool:
    kind = node.get_type_name()
    if kind in _PRODUCTS or node.get_output_size() != 1:
        return False
    return kind in _MOVES or bool(node.get_output_partial_shape(0) == shape)
