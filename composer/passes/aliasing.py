"""Memory in a graph before autograd: which nodes share it, write to it, and return it.

At stage ``aten`` the graph has views and operations in place. A rewrite that merges or drops nodes
is exact only if no write and no returned value shows the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.norms import KEEP_STATISTICS


class Aliasing:
    """Says which nodes may share memory, and which memory is written to or returned.

    Two nodes share memory if an operator's schema says so, or if their fake values share it. Memory
    counts as written if any node writes to it, early or late in the graph. Code that is not an
    operator (a submodule, a branch of ``torch.cond``) counts as writing to all its inputs.
    """

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self._parent: dict[torch.fx.Node, torch.fx.Node] = {}
        self._first: dict[int, torch.fx.Node] = {}
        written: list[torch.fx.Node] = []
        returned: list[torch.fx.Node] = []
        for node in gm.graph.nodes:
            self._share(node)
            written += _written(node)
            returned += node.all_input_nodes if node.op == "output" else []
        self._written = {self.root(node) for node in written}
        self._returned = {self.root(node) for node in returned}
        sources = (node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr"))
        self._given = {self.root(node) for node in sources}

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the representative of all nodes that share memory with this one."""
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node

    def is_written(self, *nodes: torch.fx.Node) -> bool:
        """True if the graph writes to the memory of one of the nodes."""
        return any(self.root(node) in self._written for node in nodes)

    def is_returned(self, *nodes: torch.fx.Node) -> bool:
        """True if the graph returns the memory of one of the nodes."""
        return any(self.root(node) in self._returned for node in nodes)

    def is_given(self, *nodes: torch.fx.Node) -> bool:
        """True if the memory of one of the nodes belongs to an input or an attribute."""
        return any(self.root(node) in self._given for node in nodes)

    def is_own(self, *nodes: torch.fx.Node) -> bool:
        """True if the memory of the nodes is not written to, returned, or an input or attribute.

        Other memory with equal content can then take its place.
        """
        return not (self.is_written(*nodes) or self.is_returned(*nodes) or self.is_given(*nodes))

    def _share(self, node: torch.fx.Node) -> None:
        if node.op == "output" or _torch.modes.changes_state(node.target):
            return
        operator = node.target if isinstance(node.target, _torch.operators.OpOverload) else None
        is_source = node.op in ("placeholder", "get_attr")
        if not is_source and (operator is None or _torch.operators.shares_memory(operator)):
            for source in filter(holds_memory, node.all_input_nodes):
                self._join(node, source)
        for tensor in tensors(node.meta.get("val")):
            self._join(node, self._first.setdefault(_torch.tensors.storage_id(tensor), node))

    def _join(self, node: torch.fx.Node, other: torch.fx.Node) -> None:
        self._parent[self.root(node)] = self.root(other)


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    if node.op in ("placeholder", "get_attr", "output") or _torch.modes.changes_state(node.target):
        return []
    if not isinstance(node.target, _torch.operators.OpOverload):
        return [] if getattr(node.target, "__module__", "") == "_operator" else node.all_input_nodes
    if _torch.operators.operator_name(node.target).removeprefix("aten::") in KEEP_STATISTICS:
        statistics = (
            _torch.operators.argument(node, name) for name in ("running_mean", "running_var")
        )
        trains = _torch.operators.argument(node, "training") or _torch.operators.argument(
            node, "use_input_stats"
        )
        return [each for each in statistics if trains and isinstance(each, torch.fx.Node)]
    return _torch.operators.written_by(node)


def holds_memory(node: torch.fx.Node) -> bool:
    """True if a node's result is not just a number."""
    numbers = int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
    return not isinstance(node.meta.get("val"), numbers)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors in a fake value; only these can share memory."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, torch.Tensor) and each.layout is torch.strided:
            yield each
