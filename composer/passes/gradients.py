"""Which results of a graph before autograd need a gradient, and which are given one."""

from __future__ import annotations

import torch
import torch.fx

from composer import _torch
from composer.passes.aliasing import Aliasing, holds_memory
from composer.passes.modes import NodeModes

aten = torch.ops.aten


class Gradients:
    """Which inputs, weights and results need a gradient, as ``requires_grad`` will say of them.

    Not all are given one: what only a comparison or ``detach`` reads is not on the way back from
    what is returned. Of memory that the graph writes to it is taken to be.
    """

    def __init__(self, gm: torch.fx.GraphModule, aliasing: Aliasing, modes: NodeModes) -> None:
        self._modes = modes
        self._needed: set[torch.fx.Node] = set()
        self._reached: set[torch.fx.Node] = set()
        for node in gm.graph.nodes:
            if self._is_needed(node):
                self._needed.add(node)
        for node in reversed(gm.graph.nodes):
            hands_on = node in self._reached or (node in self._needed and aliasing.is_written(node))
            if node.op == "output" or hands_on:
                self._reached.update(self._needed.intersection(node.all_input_nodes))

    def reach(self, node: torch.fx.Node) -> bool:
        """Whether the result is given a gradient, which eager gives to what it is made of."""
        return node in self._reached

    def of_inputs(self, node: torch.fx.Node) -> tuple[bool, ...]:
        """For each node that is read, whether the operation hands a gradient on to it."""
        recorded = self._modes.records_grad(node)
        return tuple(recorded and each in self._needed for each in node.all_input_nodes)

    def _is_needed(self, node: torch.fx.Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return bool(getattr(node.meta.get("val"), "requires_grad", False))
        if node.target is aten.detach.default or _reads_only_metadata(node):
            return False
        return _may_have_one(node) and any(self.of_inputs(node))


def _reads_only_metadata(node: torch.fx.Node) -> bool:
    """Whether it is ``zeros_like``, ``new_ones`` or one of their kin."""
    name = _torch.operators.operator_name(node.target)
    return name.endswith("_like") or name.startswith("aten::new_")


def _may_have_one(node: torch.fx.Node) -> bool:
    """Whether gradients are defined for what the result holds."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return holds_memory(node)
    return value.dtype.is_floating_point or value.dtype.is_complex
