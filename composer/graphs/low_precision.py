"""Which nodes an engine may compute in low precision: a mark that goes through AOTAutograd."""

from __future__ import annotations

from typing import Any

import torch.fx

_CUSTOM, _MARK = "custom", "composer_low_precision"
"""What ``torch.fx.traceback.annotate`` writes to is copied to all that is made of a node."""


def mark(node: torch.fx.Node) -> None:
    """Say of a node that it may be computed in low precision."""
    node.meta[_CUSTOM] = {**node.meta.get(_CUSTOM, {}), _MARK: True}


def mark_of(node: torch.fx.Node) -> dict[str, Any]:
    """The part of a node's metadata that marks it; empty where it is not marked."""
    return {_CUSTOM: {_MARK: True}} if _MARK in node.meta.get(_CUSTOM, {}) else {}


def marked(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The marked nodes, and all that reads them: nothing else reads what one of these gives."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if mark_of(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
