"""Models that OpenVINO must not compile in *snippets*, its kernels of several operations.

OpenVINO 2026.4 makes three kinds of them wrongly:

- Sequences of products of two dimensions. OpenVINO fuses the operations behind a product into the
  kernel. For a difference, a quotient or a power with a second operand the process crashes during
  compilation; OpenVINO rejects ``Mish``.
- Attention with a transpose of either the queries or the result. The kernel takes the transpose in,
  and writes its result over the queries where both have the same shape. If the transpose does not
  change the shape (as many queries as heads), rows are overwritten before they are read, and the
  numbers are wrong. They are right if the kernel takes in both transposes, which it does in float32
  only. With dynamic sizes the result has memory of its own.
- Attention whose result is combined with a computed operand, and then divided by or normalized with
  the sums of its rows. The process crashes during compilation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from composer.backends.openvino.nodes import (
    constant_of,
    kinds_of,
    rank_of,
    reachable,
    readers,
    sizes_of,
    sources,
)

SEPARATE = {"SNIPPETS_MODE": "DISABLE"}
"""The property that makes OpenVINO compile each operation by itself, as it did before snippets.

The engine also sets it where OpenVINO cannot make a kernel: a long chain of operations may need
more registers than there are.
"""

_BREAK_BY_OPERAND = {"Subtract", "Divide", "Power", "SquaredDifference", "Mod", "FloorMod"}
_LENGTH, _RANK = 2, 2
_PRODUCTS = {"MatMul", "ScaledDotProductAttention"}
_MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze"}
_COPIES = {"Identity", "Broadcast"}
_SWAP = [0, 2, 1, 3]
"""The only order of a transpose of queries or a result that the kernel takes in."""


def config_for(read: Any, *, in_float32: bool) -> Mapping[str, str]:
    """Return the properties that a model needs; empty unless a kernel for it would be wrong.

    Args:
        read: A model as OpenVINO read it.
        in_float32: True if OpenVINO computes float32 in no other precision.
    """
    nodes = read.get_ops()
    if _breaks_a_sequence(nodes):
        return SEPARATE
    for node in nodes:
        if _is_normalized(node):
            return SEPARATE
        if _may_be_overwritten(node) and not (in_float32 and _swaps_both(node)):
            return SEPARATE
    return {}


def _breaks_a_sequence(nodes: list[Any]) -> bool:
    flat = list(filter(_is_flat, nodes))
    if kinds_of(flat).count("MatMul") < _LENGTH:
        return False
    return any(map(_breaks, flat))


def _is_flat(node: Any) -> bool:
    """True if a node returns floating-point values in at most two dimensions."""
    if node.get_output_size() != 1 or not node.get_output_element_type(0).is_real():
        return False
    return rank_of(node.output(0)) in range(_RANK + 1)


def _breaks(node: Any) -> bool:
    """True if the process crashes, or OpenVINO rejects the operation, behind a flat product."""
    if node.get_type_name() in _BREAK_BY_OPERAND:
        return not any(map(_is_number, sources(node)))
    return bool(node.get_type_name() == "Mish")


def _is_number(node: Any) -> bool:
    """True for a constant of one element."""
    return bool(node.get_type_name() == "Constant" and math.prod(node.get_output_shape(0)) == 1)


def _may_be_overwritten(node: Any) -> bool:
    """True for attention over as many queries as heads: a transpose may keep its shape."""
    if node.get_type_name() != "ScaledDotProductAttention" and not _scores_of(node):
        return False
    sizes = sizes_of(node.output(0))
    return len(sizes) == len(_SWAP) and sizes[1] == sizes[2] != -1


def _scores_of(node: Any) -> list[Any]:
    """Return the products that a product reads as its first operand, maybe by way of a softmax."""
    if node.get_type_name() != "MatMul":
        return []
    operand = sources(node)[0]

    def passes(other: Any) -> bool:
        return other.get_type_name() != "Transpose" and _hands_on(operand, other)

    behind = reachable(operand, sources, passes) if passes(operand) else ()
    return [each for each in (operand, *behind) if each.get_type_name() == "MatMul"]


def _swaps_both(node: Any) -> bool:
    """True if the kernel of attention is sure to take in a transpose of queries and of the result.

    A transpose beside another one is left out: OpenVINO makes one of both. So is a transpose of a
    result that is not read by a product: element-wise operations behind it are moved in front.
    """
    scores = _scores_of(node)
    if len(scores) != 1:
        return False
    queries = list(_line(scores[0], lambda each: sources(each)[:1]))
    result = list(_line(node, readers))
    ends = kinds_of(readers([node, *result][-1]))
    return all(map(_swaps, (queries, result))) and {"MatMul", "Result"}.issuperset(ends)


def _line(node: Any, step: Callable[[Any], list[Any]]) -> Iterator[Any]:
    """Yield the nodes next to a node that only move or copy its value, for one reader each."""
    found = step(node)
    while len(found) == 1 and _only_moves(found[0]):
        yield found[0]
        found = step(found[0])


def _only_moves(node: Any) -> bool:
    """True if a node returns the elements of its first operand, each once and to one reader."""
    kind = node.get_type_name()
    copies = kind in _COPIES and sizes_of(node.input(0)) == sizes_of(node.output(0))
    return len(readers(node)) == 1 and (copies or kind in _MOVES)


def _swaps(line: list[Any]) -> bool:
    """True if the first move of a line swaps heads and places, and is its only transpose."""
    moves = [node for node in line if node.get_type_name() in _MOVES]
    kinds = kinds_of(moves)
    if (kinds[:1], kinds.count("Transpose")) != (["Transpose"], 1):
        return False
    order = constant_of(sources(moves[0])[1])
    return order is not None and order.data.tolist() == _SWAP


def _is_normalized(node: Any) -> bool:
    """True for attention whose result is combined with an operand, then reduced."""
    if node.get_type_name() == "Softmax":
        products = (user for user in _users(node) if user.get_type_name() == "MatMul")
        return any(map(_is_reduced, products))
    return node.get_type_name() == "ScaledDotProductAttention" and _is_reduced(node)


def _is_reduced(attention: Any) -> bool:
    """True if the result of attention is combined with a computed operand, then reduced."""
    users = itertools.chain.from_iterable(map(_users, filter(_combines, _users(attention))))
    return any(kind == "MVN" or kind.startswith("Reduce") for kind in kinds_of(users))


def _combines(node: Any) -> bool:
    """True if a node computes something of two operands that are not the same at every call."""
    if node.get_type_name() in _PRODUCTS | _MOVES:
        return False
    kinds = kinds_of(sources(node))
    return len(kinds) - kinds.count("Constant") - kinds.count("Parameter") > 1


def _users(node: Any) -> Iterator[Any]:
    """Yield the users of a node, also behind element-wise operations and moves.

    The search stops at products: they are yielded, but their users are not.
    """
    return reachable(node, readers, functools.partial(_hands_on, node))


def _hands_on(node: Any, other: Any) -> bool:
    """True if another node moves a value or is element-wise, for values of this node's shape."""
    kind = other.get_type_name()
    if kind in _PRODUCTS or other.get_output_size() != 1:
        return False
    return kind in _MOVES or bool(
        other.get_output_partial_shape(0) == node.get_output_partial_shape(0)
    )
