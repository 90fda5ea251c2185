"""Which results of a graph before autograd need a gradient."""

from __future__ import annotations

import torch
import torch.fx

from composer.passes.memory import Regions, holds_memory

aten = torch.ops.aten


class Gradients:
    """Which inputs, weights and results need a gradient, as ``requires_grad`` will say of them."""

    def __init__(self, gm: torch.fx.GraphModule, regions: Regions) -> None:
        self._regions = regions
        self._needed: set[torch.fx.Node] = set()
        for node in gm.graph.nodes:
            if self._is_needed(node):
                self._needed.add(node)

    def of_inputs(self, node: torch.fx.Node) -> tuple[bool, ...]:
        """For each node that is read, whether the operation hands a gradient on to it."""
        recorded = self._regions.records_grad(node)
        return tuple(recorded and each in self._needed for each in node.all_input_nodes)

    def _is_needed(self, node: torch.fx.Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return bool(getattr(node.meta.get("val"), "requires_grad", False))
        if node.target is aten.detach.default or not _may_have_one(node):
            return False
        return any(self.of_inputs(node))


def _may_have_one(node: torch.fx.Node) -> bool:
    """Whether gradients are defined for what the result holds."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return holds_memory(node)
    return value.dtype.is_floating_point or value.dtype.is_complex
