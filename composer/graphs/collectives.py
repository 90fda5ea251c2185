"""Does a graph itself wait for other ranks of ``torch.distributed``?

One that does cannot be run once more on one rank alone, to answer for an engine or to check it:
the others would not take part, or would take part with what belongs to a later call.
"""

from __future__ import annotations

import sys

import torch.fx

from composer import _torch
from composer.graphs.nodes import value_of

_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d"}
    | {"_dtensor", "symm_mem"}
)
"""Where torch keeps operators that speak with other ranks; FSDP's own ones in ``fsdp`` do not."""


def meets_other_ranks(gm: torch.fx.GraphModule) -> bool:
    """Whether there are other ranks, and an operation of the graph may wait for them.

    Operations on a ``DTensor`` may: which collectives they need is found after Dynamo.
    """
    if _torch.ranks.world_size() == 1:
        return False
    graphs = (each for each in gm.modules() if isinstance(each, torch.fx.GraphModule))
    nodes = (node for each in graphs for node in each.graph.nodes)
    return any(
        _torch.operators.operator_namespace(node.target) in _NAMESPACES or _is_spread(node)
        for node in nodes
    )


def _is_spread(node: torch.fx.Node) -> bool:
    """Whether the node's value is a ``DTensor``; nobody has one who has not imported the module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value_of(node), module.DTensor)
