"""Constants that OpenVINO would mistake for one another, since products read them in several ways.

OpenVINO (2026.4) knows what it laid out for a product by the address of the constant, and takes
what it made of the transposed one for the other. What is an input is laid out at every call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from typing import Any

_SAME_MEMORY = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity"}
"""Nodes that hand a constant on to a product without a copy."""

_MAY_BE_NOTHING = {"Slice", "StridedSlice", "Convert", "Broadcast", "Pad"}
"""Nodes that do so where they leave out and add nothing, which they may if the shape stays."""

_SMALL = 4096
"""Bytes; constants of as many are compared by what is in them, larger ones by name."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor that is the same at every call.

    ``memory`` is the number of what made it, equal for what is made equally, ``seen`` how that is
    looked at since, ``weights`` what it is made of. ``folded`` says whether it is there before the
    first call.
    """

    memory: int
    seen: str
    weights: frozenset[str]
    folded: bool = True


def read_in_several_ways(read: Any, weights: Collection[str]) -> list[frozenset[str]]:
    """What products read both transposed and as it is, or in other shapes.

    Args:
        read: A model as OpenVINO read it.
        weights: Names of its inputs that become constants.

    Returns:
        The names of the weights that each such constant is made of; none, where the model makes it
        of its own constants.
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
        """See what a node reads, and what comes out of it."""
        given = [self._values.get(_place(each)) for each in node.input_values()]
        kind = node.get_type_name()
        if kind == "MatMul" or "Convolution" in kind:
            for reader, value in zip(node.inputs(), given, strict=True):
                if value is not None:
                    way = _way(reader) if kind == "MatMul" else kind
                    self.ways[value.memory].add(f"{value.seen}{way}")
                    self.made_of[value.memory] = value.weights
        known = [each for each in given if each is not None and each.folded]
        folded = len(known) == len(given)
        if given and given[0] is not None and _hands_on(node):
            seen = f"{given[0].seen}{'' if kind == 'Identity' else _way(node.input(0))}"
            self._values[_place(node.output(0))] = replace(given[0], seen=seen, folded=folded)
        elif given and folded:
            made = kind, str(node.get_attributes()), tuple((it.memory, it.seen) for it in known)
            self._make(node, made, frozenset().union(*(each.weights for each in known)))
        elif (source := self._source(node)) is not None:
            self._make(node, source, self._weights & {node.friendly_name})

    def _source(self, node: Any) -> Hashable:
        """What a node is known by that gives the same without any operand that is."""
        kind = node.get_type_name()
        if kind == "Constant":
            return _content(node)
        if kind == "ShapeOf" and node.input(0).get_partial_shape().is_static:
            return kind, str(node.get_attributes()), tuple(node.get_input_shape(0))
        return node.friendly_name if node.friendly_name in self._weights else None

    def _make(self, node: Any, made: Hashable, weights: frozenset[str]) -> None:
        for output in node.outputs():
            number = self._numbers.setdefault((made, output.get_index()), len(self._numbers))
            self._values[_place(output)] = _Value(number, "", weights)


def _place(output: Any) -> tuple[str, int]:
    return output.get_node().get_name(), output.get_index()


def _hands_on(node: Any) -> bool:
    """Whether a node may give the memory of its first operand."""
    if node.get_type_name() in _MAY_BE_NOTHING:
        given, made = node.input(0), node.output(0)
        same = given.get_partial_shape() == made.get_partial_shape()
        return bool(same and given.get_element_type() == made.get_element_type())
    return node.get_type_name() in _SAME_MEMORY


def _content(constant: Any) -> Hashable:
    """What a constant is known by: its numbers, or its name."""
    if constant.get_byte_size() > _SMALL:
        return str(constant.get_name())
    shape = tuple(constant.get_output_shape(0))
    numbers: bytes = constant.data.tobytes()
    return str(constant.get_element_type()), shape, numbers


def _way(reader: Any) -> str:
    """How a node reads one of its inputs: what it is, by which axes or shape, at which place."""
    node = reader.get_node()
    given = (each.get_node() for each in node.input_values())
    said = [
        each.get_data().tolist()
        for each in given
        if each.get_type_name() == "Constant" and len(each.get_output_shape(0)) < 2
    ]
    return f"{node.get_type_name()} {node.get_attributes()} {said} {reader.get_index()}; "
