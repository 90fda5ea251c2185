"""Traces nodes of a region back to the functional graph it was cut from, by a mark in ``meta``."""

from __future__ import annotations

import torch.fx

_ORIGIN = "composer_origin"


def mark_origins(gm: torch.fx.GraphModule) -> None:
    """Write each node's name to its metadata, which is copied to nodes that are made from it."""
    for node in gm.graph.nodes:
        node.meta[_ORIGIN] = node.name


def origin_of(node: torch.fx.Node) -> str:
    """Return the name of the marked node that this node comes from, or else its own name."""
    return str(node.meta.get(_ORIGIN, node.name))


def origins_of(gm: torch.fx.GraphModule) -> dict[str, str]:
    """Map the name of each node to the name of its origin."""
    return {node.name: origin_of(node) for node in gm.graph.nodes}
