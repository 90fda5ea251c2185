"""Finds the first node at which a place in a graph differs from a pattern, and says how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from composer import _torch


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A place where the last operation of a pattern was found, but not all of it.

    ``anchor`` is the node of the graph that matches that last operation. ``pattern_node`` is the
    first node of the pattern that did not match, and ``graph_node`` is the graph's node there.
    """

    anchor: str
    pattern_node: str
    graph_node: str
    why: str


def compare(
    wanted: torch.fx.Node, found: torch.fx.Node, *, ignore_literals: bool
) -> dict[torch.fx.Node, Any] | NearMiss:
    """Compare a node of the pattern and one of a graph, and then their inputs, as torch does.

    Returns:
        The graph's value for each node of the pattern, or the first node that does not match.
    """
    comparison = _Comparison(found.name, ignore_literals=ignore_literals)
    return comparison.of_nodes(wanted, found) or comparison.images


class _Comparison:
    def __init__(self, place: str, *, ignore_literals: bool) -> None:
        self._place = place
        self.images: dict[torch.fx.Node, Any] = {}
        self._ignore_literals = ignore_literals

    def of_nodes(self, wanted: torch.fx.Node, found: torch.fx.Node) -> NearMiss | None:
        if wanted in self.images:
            return self._again(wanted, found)
        for other, image in self.images.items():
            if image is found:
                return NearMiss(
                    self._place, wanted.name, found.name, f"it stands for {other.name} already"
                )
        if wanted.op == "placeholder":
            self.images[wanted] = found
            return None
        if (wanted.op, wanted.target) != (found.op, found.target):
            why = f"it is {called(found)}, not {called(wanted)}"
            return NearMiss(self._place, wanted.name, found.name, why)
        self.images[wanted] = found
        return self._of_arguments(wanted, found)

    def _again(self, wanted: torch.fx.Node, found: Any) -> NearMiss | None:
        """Compare with the image that the pattern's node has already."""
        image = self.images[wanted]
        is_equal = not isinstance(found, torch.fx.Node) and image == found
        if image is found or is_equal:
            return None
        return NearMiss(self._place, wanted.name, str(found), f"{wanted.name} is {image} already")

    def _of_arguments(self, wanted: torch.fx.Node, found: torch.fx.Node) -> NearMiss | None:
        ours, theirs = _named(wanted), _named(found)
        if list(ours) != list(theirs):
            why = f"it is given {', '.join(theirs)}; the pattern gives {', '.join(ours)}"
            return NearMiss(self._place, wanted.name, found.name, why)
        for name, argument in ours.items():
            unmatched = self._of_values(argument, theirs[name])
            if isinstance(unmatched, str):
                return NearMiss(self._place, wanted.name, found.name, f"its {name} {unmatched}")
            if unmatched is not None:
                return unmatched
        return None

    def _of_values(self, wanted: Any, found: Any) -> NearMiss | str | None:
        """Return how two arguments differ: a text if they are not nodes, ``None`` if they match."""
        if isinstance(wanted, torch.fx.Node):
            return self._of_node_and_value(wanted, found)
        if isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
            return self._of_lists(wanted, found)
        is_same = type(wanted) is type(found) and wanted == found
        return None if is_same or self._ignore_literals else f"is {found!r}, not {wanted!r}"

    def _of_node_and_value(self, wanted: torch.fx.Node, found: Any) -> NearMiss | str | None:
        if isinstance(found, torch.fx.Node):
            return self.of_nodes(wanted, found)
        if wanted.op != "placeholder":
            return None if self._ignore_literals else f"is {found!r}, not {called(wanted)}"
        if wanted in self.images:
            return self._again(wanted, found)
        self.images[wanted] = found
        return None

    def _of_lists(self, wanted: Any, found: Any) -> NearMiss | str | None:
        difference = f"is {found!r}, not {wanted!r}"
        if len(wanted) != len(found):
            return difference
        for ours, theirs in zip(wanted, found, strict=True):
            unmatched = self._of_values(ours, theirs)
            if unmatched is not None:
                return difference if isinstance(unmatched, str) else unmatched
        return None


def _named(node: torch.fx.Node) -> dict[str, Any]:
    positional = {f"argument {index}": each for index, each in enumerate(node.args)}
    return {**positional, **node.kwargs}


_KINDS = {"call_method": "the method", "get_attr": "the attribute", "call_module": "the module"}


def called(node: torch.fx.Node) -> str:
    """Return what a node is: ``"aten.relu.default"``, ``"the method relu"`` or the like."""
    if node.op == "placeholder":
        return "an input of the graph"
    if node.op in _KINDS:
        return f"{_KINDS[node.op]} {node.target}"
    if isinstance(node.target, _torch.operators.OpOverload):
        return str(node.target)
    module = getattr(node.target, "__module__", None) or "torch"  # torch's builtins have none
    return f"{module.lstrip('_')}.{getattr(node.target, '__name__', node.target)}"
