"""Short names for questions about the nodes of OpenVINO's models, and for changes of them.

A *value* is an output of a node, or an input that reads one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

SUMS = frozenset({"Add", "Subtract"})
PRODUCTS = frozenset({"Multiply", "Divide"})
"""Element-wise products; a product of matrices is a ``MatMul``."""

_SAME_ELEMENTS = frozenset({"Convert", "ConvertLike", "Reshape", "Unsqueeze"})


def nodes_of(model: Any, kinds: Iterable[str]) -> list[Any]:
    """Return the nodes of these types, in the order of the computation."""
    return [node for node in model.get_ordered_ops() if node.get_type_name() in kinds]


def sources(node: Any) -> list[Any]:
    """Return the nodes whose values a node reads, by the index of the input."""
    return [value.get_node() for value in node.input_values()]


def readers(node: Any) -> list[Any]:
    """Return the nodes that read a node's values."""
    targets = (target for output in node.outputs() for target in output.get_target_inputs())
    return [target.get_node() for target in targets]


def kinds_of(nodes: Iterable[Any]) -> list[str]:
    """Return the type of each node, such as ``"MatMul"``."""
    return [node.get_type_name() for node in nodes]


def reachable(
    node: Any,
    step: Callable[[Any], Iterable[Any]],
    passes: Callable[[Any], bool] = lambda _: True,
) -> Iterator[Any]:
    """Yield the nodes that are reached from a node, each once.

    Args:
        node: Where to start. It is not among the result.
        step: :func:`sources` or :func:`readers`.
        passes: Returns True if the search goes on behind a node that it reached; by default always.
    """
    waiting, known = [node], {node.get_name()}
    while waiting:
        for neighbour in step(waiting.pop()):
            if neighbour.get_name() in known:
                continue
            known.add(neighbour.get_name())
            yield neighbour
            if passes(neighbour):
                waiting.append(neighbour)


def constant_of(node: Any) -> Any:
    """Return the constant that a node is, converts or reshapes; ``None`` if there is none."""
    while node.get_type_name() in _SAME_ELEMENTS:
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" else None


def rank_of(value: Any) -> int | None:
    """Return the number of dimensions of a value; ``None`` if it is unknown."""
    rank = value.get_partial_shape().rank
    return None if rank.is_dynamic else int(rank.get_length())


def sizes_of(value: Any) -> list[int]:
    """Return the size of each dimension, -1 if it is dynamic; an empty list if the rank is."""
    if rank_of(value) is None:
        return []
    return [-1 if size.is_dynamic else size.get_length() for size in value.get_partial_shape()]


def redirect(targets: Iterable[Any], node: Any) -> None:
    """Make inputs of nodes read the value of another node."""
    for target in targets:
        target.replace_source_output(node.output(0))


def insert_behind(node: Any, change: Callable[[Any], Any]) -> None:
    """Make the readers of a node read what ``change`` returns for it, which may read the node."""
    targets = node.output(0).get_target_inputs()
    redirect(targets, change(node))
