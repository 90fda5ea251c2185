"""Traces nodes of a region back to the functional graph it was cut from, by a mark in ``meta``."""

from __future__ import annotations

import torch.fx

_ORIGIN = "composer_origin"


def mark_origins(gm: torch.fx.GraphModule) -> None:
    """Have every node carry its name along, wherever its metadata is copied to."""
    for node in gm.graph.nodes:
        node.meta[_ORIGIN] = node.name


def origin_of(node: torch.fx.Node) -> str:
    """The name that the node had when it was marked; its own where it was made later."""
    return str(node.meta.get(_ORIGIN, node.name))


def origins_of(gm: torch.fx.GraphModule) -> dict[str, str]:
    """Name of each node to its origin's."""
    return {node.name: origin_of(node) for node in gm.graph.nodes}
