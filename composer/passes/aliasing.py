"""Memory in a graph before autograd: which nodes share it, write to it, and return it.

At stage ``aten`` the graph has views and operations in place. A rewrite that merges or drops nodes
is exact only if no write and no returned value shows the difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import is_strided
from composer.graphs.writes import updates_statistics


class Aliasing:
    """Says which nodes may share memory, and which memory is written to or returned.

    Two nodes share memory if an operator's schema says so, or if their fake values share it. Memory
    counts as written if any node writes to it, early or late in the graph. Code that is not an
    operator (a submodule, a branch of ``torch.cond``) counts as writing to all its inputs.
    """

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self._parent: dict[torch.fx.Node, torch.fx.Node] = {}
        self._first: dict[int, torch.fx.Node] = {}
        graph = gm.graph
        for node in graph.nodes:
            self._join_sharers(node)
        written = itertools.chain.from_iterable(map(_written, graph.nodes))
        returned = graph.output_node().all_input_nodes
        given = (*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"))
        self._written = set(map(self.root, written))
        self._observed = self._written.union(map(self.root, returned))
        self._given = set(map(self.root, given))

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the representative of all nodes that share memory with this one."""
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node

    def is_written(self, *nodes: torch.fx.Node) -> bool:
        """True if the graph writes to the memory of one of the nodes."""
        return not self._written.isdisjoint(map(self.root, nodes))

    def is_observed(self, *nodes: torch.fx.Node) -> bool:
        """True if the graph writes to the memory of one of the nodes, or returns it."""
        return not self._observed.isdisjoint(map(self.root, nodes))

    def is_own(self, *nodes: torch.fx.Node) -> bool:
        """True if the memory of the nodes is not written to, returned, or an input or attribute.

        Other memory with equal content can then take its place.
        """
        is_given = not self._given.isdisjoint(map(self.root, nodes))
        return not (is_given or self.is_observed(*nodes))

    def _join_sharers(self, node: torch.fx.Node) -> None:
        """Join the node with the inputs and the earlier nodes that may share its memory."""
        if node.op == "output":
            return
        target = node.target
        is_overload = isinstance(target, _torch.operators.OpOverload)
        if not is_overload or _torch.operators.shares_memory(cast(Any, target)):
            for source in filter(holds_memory, node.all_input_nodes):
                self._join(node, source)
        for tensor in tensors(node.meta.get("val")):
            self._join(node, self._first.setdefault(_torch.tensors.storage_id(tensor), node))

    def _join(self, node: torch.fx.Node, other: torch.fx.Node) -> None:
        self._parent[self.root(node)] = self.root(other)


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    if isinstance(node.target, _torch.operators.OpOverload):
        statistics = ("running_mean", "running_var") if updates_statistics(node) else ()
        return [*_torch.operators.written_by(node), *operands(node, *statistics)]
    is_pythons = getattr(node.target, "__module__", "") == "_operator"
    return [] if is_pythons or node.op == "output" else node.all_input_nodes


def operands(node: torch.fx.Node, *names: str) -> list[torch.fx.Node]:
    """Return those of the named arguments of an operator's call that are nodes."""
    values = [_torch.operators.argument(node, name) for name in names]
    return [value for value in values if isinstance(value, torch.fx.Node)]


def holds_memory(node: torch.fx.Node) -> bool:
    """True if a node's result is not just a number."""
    numbers = int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
    return not isinstance(node.meta.get("val"), numbers)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return the strided tensors in a fake value; only these can share memory."""
    return filter(is_strided, value if isinstance(value, list | tuple) else [value])
