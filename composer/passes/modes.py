"""Under which modes the operations of a graph before autograd stand: grad mode and autocast.

At the stage ``aten`` a program switches both by calls like any other. A rewrite is exact there if
what it merges or moves is computed under the same modes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from composer import _torch


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes that the graph itself has put torch in.

    ``grad`` is grad mode, ``None`` as long as the graph has not switched it; ``autocast`` are the
    arguments of the regions of autocast that are open, the outermost first.
    """

    grad: bool | None = None
    autocast: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeModes:
    """The modes of every node. Nodes with equal modes are computed under the same state."""

    of: dict[torch.fx.Node, Modes] = field(default_factory=dict)

    @staticmethod
    def in_graph(graph: torch.fx.Graph) -> NodeModes:
        """Follow the switches from the first node to the last."""
        grad: bool | None = None
        open_now: dict[torch.fx.Node, Any] = {}
        found = NodeModes()
        for node in graph.nodes:
            if _torch.modes.enters_autocast(node.target):
                open_now[node] = node.args
            elif _torch.modes.changes_state(node.target):
                if node.args and node.args[0] in open_now:
                    del open_now[node.args[0]]
                else:
                    grad = bool(node.args[0])
            found.of[node] = Modes(grad, tuple(open_now.values()))
        return found

    def records_grad(self, node: torch.fx.Node) -> bool:
        """Whether autograd is on where the node stands: as the call has it, or the graph itself."""
        grad = self.of[node].grad
        return torch.is_grad_enabled() if grad is None else grad

    def keeps_grad(self, node: torch.fx.Node) -> bool:
        """Whether the node's result needs a gradient if, and only if, its input does.

        Under a grad mode that the graph never switches it does: with grad off nothing in it has
        one. A view or a copy made in a region without grad cuts the gradient off.
        """
        grad = self.of[node].grad
        return bool(grad) or all(modes.grad is None for modes in self.of.values())
