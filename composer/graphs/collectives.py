"""Detection of graphs that wait for other ranks of ``torch.distributed``.

Such a graph must not be run a second time on one rank only, as a fallback or to check an engine.
The other ranks would not take part, or would answer with data of a later call.
"""

from __future__ import annotations

import sys

import torch.fx

from composer import _torch
from composer.graphs.nodes import nodes_within, value_of

_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d"}
    | {"_dtensor", "symm_mem"}
)
"""Namespaces of operators that communicate with other ranks; those in ``fsdp`` do not."""


def meets_other_ranks(gm: torch.fx.GraphModule) -> bool:
    """True if there are other ranks and an operation of the graph may wait for them.

    Operations on a ``DTensor`` count, because their collectives are only known after Dynamo.
    """
    if _torch.ranks.world_size() == 1:
        return False
    return any(map(_may_wait, nodes_within(gm)))


def _may_wait(node: torch.fx.Node) -> bool:
    namespace = _torch.operators.operator_namespace(node.target)
    return namespace in _NAMESPACES or _is_spread(node)


def _is_spread(node: torch.fx.Node) -> bool:
    """True if the node's value is a ``DTensor``.

    No value can be one as long as nobody has imported ``torch.distributed.tensor``.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value_of(node), module.DTensor)
