"""A mark for nodes that an engine may compute in low precision; AOTAutograd keeps it."""

from __future__ import annotations

from typing import Any

import torch.fx

_CUSTOM, _MARK = "custom", "composer_low_precision"
"""The metadata key of ``torch.fx.traceback.annotate``, which torch copies to all nodes made from
one, and composer's mark under that key."""


def mark(node: torch.fx.Node) -> None:
    """Mark a node as one that may be computed in low precision."""
    node.meta[_CUSTOM] = {**node.meta.get(_CUSTOM, {}), _MARK: True}


def mark_of(node: torch.fx.Node) -> dict[str, Any]:
    """The part of a node's metadata that holds the mark; empty if it is not marked."""
    return {_CUSTOM: {_MARK: True}} if _MARK in node.meta.get(_CUSTOM, {}) else {}


def marked(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The marked nodes and all their direct and indirect users.

    So no node outside of this set uses a value from it.
    """
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if mark_of(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
