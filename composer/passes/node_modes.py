"""The modes of each operation in a graph before autograd: grad mode and autocast.

At stage ``aten`` the graph switches both by calls. A rewrite that merges or moves operations is
exact only if they run under the same modes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from composer import _torch


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes that the graph has set at one node.

    ``grad`` is the grad mode, or ``None`` if the graph has not switched it yet. ``autocast`` holds
    the arguments of the open autocast regions, the outermost first.
    """

    grad: bool | None = None
    autocast: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeModes:
    """The modes of every node. Nodes with equal modes are computed under the same state."""

    of: dict[torch.fx.Node, Modes] = field(default_factory=dict)

    @staticmethod
    def in_graph(graph: torch.fx.Graph) -> NodeModes:
        """Find the modes of every node of a graph."""
        grad: bool | None = None
        regions: dict[Any, Any] = {}
        found = NodeModes()
        for node in graph.nodes:
            if _torch.modes.enters_autocast(node.target):
                regions[node] = node.args
            elif _torch.modes.changes_autocast(node.target):
                regions.pop(node.args[0], None)
            elif _torch.modes.changes_state(node.target):
                grad = bool(node.args[0])
            found.of[node] = Modes(grad, tuple(regions.values()))
        return found

    def records_grad(self, node: torch.fx.Node) -> bool:
        """True if grad mode is on at the node: set by the graph, or else by the current caller."""
        grad = self.of[node].grad
        return torch.is_grad_enabled() if grad is None else grad

    def keeps_grad(self, node: torch.fx.Node) -> bool:
        """True if the node's result needs a gradient exactly when its input does.

        That holds if the graph never switches grad mode: with grad off, no node has a gradient. It
        does not hold in a region without grad, where a view or a copy cuts the gradient off.
        """
        grad = self.of[node].grad
        return bool(grad) or all(modes.grad is None for modes in self.of.values())
