"""Constants that OpenVINO confuses where matrix products read them in several ways.

OpenVINO (2026.4) keeps the layout that it prepared for a product under the address of the constant.
If one product reads a constant transposed and another does not, it uses the layout of one for both.
It prepares the layout of an input at every call, so inputs are not affected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer.backends.openvino.nodes import sources

_SAME_MEMORY = {"Transpose", "Reshape", "Squeeze", "Unsqueeze"}
"""Nodes that hand a constant on to a product without a copy."""

_SMALL = 4096
"""Bytes. Constants up to this size are compared by their values, larger ones by name."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor that is the same at every call.

    Attributes:
        looks: The memories that it may have, each with the views taken of it since. A memory is a
            number; values that are made in the same way have the same number.
        weights: The names of the weights that it is made of.
        folded: True if it is known before the first call.
    """

    looks: frozenset[tuple[int, str]]
    weights: frozenset[str]
    folded: bool = True


def read_in_several_ways(read: Any, weights: Collection[str]) -> list[frozenset[str]]:
    """Find constants that products read in several ways, such as transposed and not transposed.

    Args:
        read: A model as OpenVINO read it.
        weights: Names of its inputs that become constants.

    Returns:
        For each such constant, the names of the weights that it is made of. The set is empty if the
        model makes it of its own constants.
    """
    memories = _Memories(frozenset(weights))
    for node in read.get_ordered_ops():
        memories.visit(node)
    return [memories.made_of[it] for it, ways in memories.ways.items() if len(ways) > 1]


class _Memories:
    """Follows constants through a model, in the order of its nodes."""

    def __init__(self, weights: frozenset[str]) -> None:
        self._weights = weights
        self._values: dict[tuple[str, int], _Value] = {}
        self._numbers: dict[Hashable, int] = {}
        self.ways: defaultdict[int, set[str]] = defaultdict(set)
        self.made_of: dict[int, frozenset[str]] = {}

    def visit(self, node: Any) -> None:
        """Record what a node reads, and what its outputs are."""
        operands = [self._values.get(_place(value)) for value in node.input_values()]
        kind = node.get_type_name()
        if _multiplies(node):
            self._record_reads(node, operands)
        folded = [value for value in operands if value is not None and value.folded]
        is_folded = len(folded) == len(operands)
        if kind in _SAME_MEMORY and operands[0] is not None:
            self._view(node, operands[0], is_folded)
        elif not operands or not is_folded:
            self._begin(node)
        else:
            made = kind, str(node.get_attributes()), tuple(value.looks for value in folded)
            weights = (value.weights for value in folded)
            self._make(node, made, frozenset().union(*weights))

    def _record_reads(self, product: Any, operands: Sequence[_Value | None]) -> None:
        """Record the ways in which a product reads the memories of its operands."""
        kind = product.get_type_name()
        for reader, value in zip(product.inputs(), operands, strict=True):
            if value is not None:
                way = _way(reader) if kind == "MatMul" else kind
                for memory, seen in value.looks:
                    self.ways[memory].add(f"{seen}{way}")

    def _view(self, node: Any, operand: _Value, is_folded: bool) -> None:
        """Give the output of a node the memory of its operand."""
        way = _way(node.input(0))
        looks = frozenset((memory, f"{seen}{way}") for memory, seen in operand.looks)
        self._values[_place(node.output(0))] = replace(operand, looks=looks, folded=is_folded)

    def _begin(self, node: Any) -> None:
        """Give a constant, a known shape or a weight a memory; other nodes have none."""
        kind, name = node.get_type_name(), node.friendly_name
        weights = self._weights & {name}
        if kind == "Constant":
            self._make(node, _content(node), weights)
        elif kind == "ShapeOf" and node.input(0).get_partial_shape().is_static:
            attributes, shape = str(node.get_attributes()), tuple(node.get_input_shape(0))
            self._make(node, (kind, attributes, shape), weights)
        elif weights:
            self._make(node, name, weights)

    def _make(self, node: Any, made: Hashable, weights: frozenset[str]) -> None:
        """Give the outputs of a node a memory.

        A node that may do nothing, such as a product with ones, may also return the memory of an
        operand.
        """
        operands = () if _multiplies(node) else node.input_values()
        for output in node.outputs():
            number = self._numbers.setdefault((made, output.get_index()), len(self._numbers))
            self.made_of[number] = weights
            looks = {(number, "")}
            for operand in operands:
                value = self._values.get(_place(operand))
                if value is not None and _is_alike(operand, output):
                    looks |= value.looks
            self._values[_place(output)] = _Value(frozenset(looks), weights)


def _multiplies(node: Any) -> bool:
    """True for products: they read operands in a layout of their own, and return new memory."""
    kind = node.get_type_name()
    return kind == "MatMul" or "Convolution" in kind


def _place(output: Any) -> tuple[str, int]:
    return output.get_node().get_name(), output.get_index()


def _is_alike(operand: Any, made: Any) -> bool:
    """True if a node may return an operand unchanged: shape and dtype are the same."""
    same = operand.get_partial_shape() == made.get_partial_shape()
    return bool(same and operand.get_element_type() == made.get_element_type())


def _content(constant: Any) -> Hashable:
    """Return what identifies a constant: its values if it is small, else its name."""
    if constant.get_byte_size() > _SMALL:
        return str(constant.get_name())
    shape = tuple(constant.get_output_shape(0))
    numbers: bytes = constant.data.tobytes()
    return str(constant.get_element_type()), shape, numbers


def _way(reader: Any) -> str:
    """Return how a node reads one of its inputs, as text.

    The text has the type and attributes of the node, its axes or shape, and the index of the input.
    """
    node = reader.get_node()
    constants = (source for source in sources(node) if source.get_type_name() == "Constant")
    numbers = [
        constant.get_data().tolist()
        for constant in constants
        if len(constant.get_output_shape(0)) < 2
    ]
    return f"{node.get_type_name()} {node.get_attributes()} {numbers} {reader.get_index()}; "
