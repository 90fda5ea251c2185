"""Values that a pass computes from a weight alone: they can be computed ahead of the calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx

_MARK = "computed_ahead"

How = Callable[[torch.Tensor], torch.Tensor]
"""Computes such a value from the weight. It is hashable, and equal to one that does the same."""


def mark(node: torch.fx.Node, weight: torch.fx.Node, how: How) -> None:
    """Note that ``how`` computes the value of a node from ``weight``, if that is an input."""
    if weight.op == "placeholder":
        node.meta[_MARK] = weight.name, how


def computed_ahead(graph: torch.fx.Graph) -> dict[str, dict[How, list[torch.fx.Node]]]:
    """Return the marked nodes, by the name of the weight and by how they are computed.

    Casts that the user wrote are not marked, since their results may be returned or written to.
    """
    found: dict[str, dict[How, list[torch.fx.Node]]] = {}
    for node in graph.nodes:
        if _MARK in node.meta:
            weight, how = node.meta[_MARK]
            found.setdefault(weight, {}).setdefault(how, []).append(node)
    return found
