"""What a graph was before a pass: to see whether it changed, and to put it back in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from composer import _torch

_STATE = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A graph module as it was, restorable in place: whoever holds the module or its graph sees it.

    ``lines`` are every node with its target and arguments; two graphs with equal lines are the
    same graph. ``copy`` holds nodes of its own. ``nested`` are the graphs that the module holds,
    such as the branches of ``torch.cond``.
    """

    lines: dict[torch.fx.Node, tuple[Any, ...]]
    copy: torch.fx.Graph
    state: dict[str, dict[str, Any]]
    nested: dict[str, Snapshot]

    @staticmethod
    def of(gm: torch.fx.GraphModule) -> Snapshot:
        """Copy the graph and those nested in it; tensors and other submodules are shared."""
        copy = torch.fx.Graph()
        transplant(gm.graph, copy)
        graphs = {n: m for n, m in gm.named_children() if isinstance(m, torch.fx.GraphModule)}
        nested = {name: Snapshot.of(graph) for name, graph in graphs.items()}
        return Snapshot(lines_of(gm.graph), copy, _state_of(gm), nested)

    def differs(self, gm: torch.fx.GraphModule) -> bool:
        """Whether a node was added, dropped, moved, or changed, or an attribute exchanged."""
        now = lines_of(gm.graph)
        same_nodes = list(now) == list(self.lines) and now == self.lines
        same_state = all(map(_is_same, self.state.values(), _state_of(gm).values()))
        return not (same_nodes and same_state) or bool(self.changed_graphs())

    def changed_graphs(self) -> dict[str, torch.fx.GraphModule]:
        """The nested graphs that are not what they were, by name."""
        held = self.state["_modules"]
        return {name: held[name] for name, each in self.nested.items() if each.differs(held[name])}

    def values(self, key: str) -> dict[torch.fx.Node, Any]:
        """The fake value of every node that had one."""
        nodes = zip(self.lines, self.copy.nodes, strict=True)
        return {node: twin.meta[key] for node, twin in nodes if key in twin.meta}

    def module(self) -> torch.nn.Module:
        """What the attributes of :attr:`copy` are read from."""
        root = torch.nn.Module()
        for name, values in self.state.items():
            getattr(root, name).update(values)
        for name, each in self.nested.items():
            setattr(root, name, torch.fx.GraphModule(each.module(), each.copy))
        return root

    def graph_module(self) -> torch.fx.GraphModule:
        """The graph as it was, to be run."""
        return torch.fx.GraphModule(self.module(), self.copy)

    def restore(self, gm: torch.fx.GraphModule) -> None:
        """Make ``gm`` what it was."""
        for name, graph in self.changed_graphs().items():
            self.nested[name].restore(graph)
        for name, values in self.state.items():
            held = getattr(gm, name)
            held.clear()
            held.update(values)
        replace_graph(gm, self.copy)


def _state_of(gm: torch.fx.GraphModule) -> dict[str, dict[str, Any]]:
    return {name: dict(getattr(gm, name)) for name in _STATE}


def _is_same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.keys() == now.keys() and all(now[name] is each for name, each in before.items())


def lines_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, tuple[Any, ...]]:
    """Operation, target and arguments of every node, in order."""
    return {
        node: (node.op, node.target, frozen(node.args), frozen(node.kwargs)) for node in graph.nodes
    }


def frozen(value: Any) -> Any:
    """An argument that can be looked up, and is equal only to one that is the same.

    Python takes ``1``, ``1.0`` and ``True`` for equal, and ``0.0`` and ``-0.0``.
    """
    if isinstance(value, torch.fx.Node):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return tuple((name, frozen(each)) for name, each in value.items())
    if isinstance(value, slice):
        return "slice", frozen((value.start, value.stop, value.step))
    return type(value), repr(value)


def replace_graph(gm: torch.fx.GraphModule, new: torch.fx.Graph) -> None:
    """Put the nodes of ``new`` in place of the module's own, within the same ``Graph`` object."""
    graph = gm.graph
    nodes = list(graph.nodes)
    for node in nodes:  # first, so that none has users; the graph may hold a cycle
        node.args, node.kwargs = (), {}
    for node in nodes:
        graph.erase_node(node)
    transplant(new, graph)
    gm.recompile()


def transplant(source: torch.fx.Graph, empty: torch.fx.Graph) -> None:
    """Copy every node into an empty graph, with what Dynamo hung on placeholders."""
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in source.nodes:
        twins[node] = empty.node_copy(node, twins.__getitem__)
        _torch.sources.carry_node_source(node, twins[node])
