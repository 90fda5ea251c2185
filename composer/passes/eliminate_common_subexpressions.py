"""The pass that merges equal operations on equal arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.fx

from composer.passes.aliasing import Aliasing
from composer.passes.base import SHARED_MODULES, GraphPass
from composer.passes.node_modes import NodeModes
from composer.passes.purity import is_function
from composer.passes.snapshot import frozen


@dataclass(frozen=True)
class EliminateCommonSubexpressions(GraphPass):
    """Replace operations that repeat an earlier one by the result of the first one.

    Two operations are equal if they have the same operator, the same input nodes, equal constants,
    and the same grad mode and autocast state. Constants are equal if their type and text are equal:
    ``1`` is not ``1.0``, and ``0.0`` is not ``-0.0``.

    Operations that draw random numbers are not merged. Others are not merged if the graph writes to
    the memory of a result or an argument, or returns the memory of a result. The program could
    then see if there are two results or one.

    Similar: ``fx_graph_cse`` of AOTAutograd's partitioner, on functional graphs.
    """

    keeps_numbers: ClassVar[bool] = True

    depends_on: ClassVar[tuple[str, ...]] = SHARED_MODULES

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Replace each repeated operation by the first one."""
        count = 0
        for node, first in self.chosen(_repetitions(gm)):
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            count += 1
        return count


def _repetitions(gm: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
    """Yield each operation that repeats an earlier one, together with the earlier one.

    The caller replaces each before it asks for the next one, since the users of a repeated
    operation may become equal after that.
    """
    aliasing, modes = Aliasing(gm), NodeModes.in_graph(gm.graph)
    known: dict[Any, torch.fx.Node] = {}
    for node in list(gm.graph.nodes):
        if not _may_merge(node, aliasing):
            continue
        key = node.target, modes.of[node], frozen(node.args), frozen(node.kwargs)
        first = known.setdefault(key, node)
        if first is not node:
            yield node, first


def _may_merge(node: torch.fx.Node, aliasing: Aliasing) -> bool:
    if not is_function(node) or aliasing.is_observed(node):
        return False
    return not aliasing.is_written(*node.all_input_nodes)
