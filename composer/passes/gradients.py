"""Finds which results of a graph before autograd need a gradient, and which receive one."""

from __future__ import annotations

import torch
import torch.fx

from composer import _torch
from composer.graphs.comparison import is_inexact
from composer.passes.aliasing import Aliasing, holds_memory
from composer.passes.node_modes import NodeModes


class Gradients:
    """Finds which nodes need a gradient (their ``requires_grad``), and which receive one.

    A node that needs a gradient receives none if no gradient path leads to it from an output, for
    example if only a comparison or ``detach`` uses it. Nodes whose memory the graph writes to are
    assumed to pass a gradient on.
    """

    def __init__(self, gm: torch.fx.GraphModule, aliasing: Aliasing, modes: NodeModes) -> None:
        self._modes = modes
        self._needed: set[torch.fx.Node] = set()
        for node in gm.graph.nodes:
            if self._is_needed(node):
                self._needed.add(node)
        self._reached = self._needed.intersection(gm.graph.output_node().all_input_nodes)
        written = set(filter(aliasing.is_written, self._needed))
        for node in reversed(gm.graph.nodes):
            if node in self._reached or node in written:
                self._reached |= self._needed.intersection(node.all_input_nodes)

    def reach(self, node: torch.fx.Node) -> bool:
        """True if the node's result receives a gradient in the backward."""
        return node in self._reached

    def of_inputs(self, node: torch.fx.Node) -> tuple[bool, ...]:
        """Return for each input of the node if the operation passes a gradient on to it."""
        recorded = self._modes.records_grad(node)
        return tuple(recorded and each in self._needed for each in node.all_input_nodes)

    def _is_needed(self, node: torch.fx.Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return bool(getattr(node.meta.get("val"), "requires_grad", False))
        name = _torch.operators.operator_name(node.target)
        reads_only_metadata = name.endswith("_like") or name.startswith("aten::new_")
        if reads_only_metadata or name == "aten::detach" or not _may_have_one(node):
            return False
        return any(self.of_inputs(node))


def _may_have_one(node: torch.fx.Node) -> bool:
    """True if gradients are defined for the dtype of the result."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return holds_memory(node)
    return is_inexact(value)
