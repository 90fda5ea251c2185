"""Compute once what the graph computes twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.fx

from composer.passes.aliasing import Aliasing
from composer.passes.base import SHARED_MODULES, GraphPass
from composer.passes.modes import Modes, NodeModes
from composer.passes.purity import is_function
from composer.passes.snapshot import frozen


@dataclass(frozen=True)
class EliminateCommonSubexpressions(GraphPass):
    """Have equal operations on equal arguments share the first one's result.

    Equal means the same operator, the same nodes, and constants of the same type and text (``1``
    is not ``1.0``, ``0.0`` is not ``-0.0``), under the same grad mode and autocast. Refused for
    what draws random numbers, and where the graph writes to, or returns, the memory of either
    result or writes to that of an argument: two results may there be told from one.

    Kin: ``fx_graph_cse`` of AOTAutograd's partitioner, on functional graphs.
    """

    keeps_numbers: ClassVar[bool] = True

    depends_on: ClassVar[tuple[str, ...]] = SHARED_MODULES

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Rewire the readers of each repetition to the first."""
        count = 0
        for node, first in self.chosen(_repetitions(gm)):
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            count += 1
        return count


def _repetitions(gm: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
    """Each operation that repeats an earlier one, which comes with it.

    Found one after the other: what reads a repetition may be one itself once that is rewired.
    """
    aliasing, modes = Aliasing(gm), NodeModes.in_graph(gm.graph)
    known: dict[Any, torch.fx.Node] = {}
    for node in list(gm.graph.nodes):
        if _may_merge(node, aliasing):
            first = known.setdefault(_key(node, modes.of[node]), node)
            if first is not node:
                yield node, first


def _may_merge(node: torch.fx.Node, aliasing: Aliasing) -> bool:
    if node.op != "call_function" or not is_function(node):
        return False
    return not (aliasing.is_written(node, *node.all_input_nodes) or aliasing.is_returned(node))


def _key(node: torch.fx.Node, modes: Modes) -> Any:
    return node.target, modes, frozen(node.args), frozen(node.kwargs)
