"""A copy of a graph from before a pass, to find out if it changed, and to restore it in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from composer import _torch
from composer.graphs.nodes import nested_graphs

_STATE = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a graph module at one time.

    It is restored in place, so other references to the module or its graph see the restored state.

    Attributes:
        lines: Operation, target and arguments of every node. Two graphs with equal lines are the
            same graph.
        copy: A copy of the graph, with its own nodes.
        state: Parameters, buffers and submodules.
        nested: Snapshots of the graphs that the module holds, such as branches of ``torch.cond``.
    """

    lines: dict[torch.fx.Node, tuple[Any, ...]]
    copy: torch.fx.Graph
    state: dict[str, dict[str, Any]]
    nested: dict[str, Snapshot]

    @staticmethod
    def of(gm: torch.fx.GraphModule) -> Snapshot:
        """Copy the graph and its nested graphs. Tensors and other submodules are shared."""
        copy = torch.fx.Graph()
        transplant(gm.graph, copy)
        nested = {name: Snapshot.of(child) for name, child in nested_graphs(gm).items()}
        return Snapshot(lines_of(gm.graph), copy, _state_of(gm), nested)

    def differs(self, gm: torch.fx.GraphModule) -> bool:
        """True if a node was added, dropped, moved or changed, or an attribute was replaced."""
        lines = lines_of(gm.graph)
        if list(lines.items()) != list(self.lines.items()):
            return True
        is_same_state = all(map(_is_same, self.state.values(), _state_of(gm).values()))
        return not is_same_state or bool(self.changed_graphs())

    def changed_graphs(self) -> dict[str, torch.fx.GraphModule]:
        """Return the nested graphs that changed, by name."""
        modules = self.state["_modules"]
        nested = self.nested.items()
        return {name: modules[name] for name, each in nested if each.differs(modules[name])}

    def values(self, key: str) -> dict[torch.fx.Node, Any]:
        """Return the old fake value of every node that had one."""
        nodes = zip(self.lines, self.copy.nodes, strict=True)
        return {node: twin.meta[key] for node, twin in nodes if key in twin.meta}

    def module(self) -> torch.nn.Module:
        """Return a module with the attributes that :attr:`copy` reads."""
        root = torch.nn.Module()
        for name, values in self.state.items():
            getattr(root, name).update(values)
        for name, each in self.nested.items():
            setattr(root, name, torch.fx.GraphModule(each.module(), each.copy))
        return root

    def graph_module(self) -> torch.fx.GraphModule:
        """Return the old graph as a module that can be run."""
        return torch.fx.GraphModule(self.module(), self.copy)

    def restore(self, gm: torch.fx.GraphModule) -> None:
        """Restore ``gm`` in place."""
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
    """True if both hold the same objects under the same names."""
    return before.keys() == now.keys() and all(now[name] is each for name, each in before.items())


def lines_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, tuple[Any, ...]]:
    """Return operation, target and arguments of every node, in order."""
    return {
        node: (node.op, node.target, frozen(node.args), frozen(node.kwargs)) for node in graph.nodes
    }


def frozen(value: Any) -> Any:
    """Return a hashable form of an argument that is equal only for identical arguments.

    In Python ``1``, ``1.0`` and ``True`` are equal, and so are ``0.0`` and ``-0.0``.
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
    """Replace the module's nodes by copies of those in ``new``; the ``Graph`` object stays."""
    graph = gm.graph
    nodes = list(graph.nodes)
    for node in nodes:  # a node can be erased only without users, and the graph may have a cycle
        node.args, node.kwargs = (), {}
    for node in nodes:
        graph.erase_node(node)
    transplant(new, graph)
    gm.recompile()


def transplant(source: torch.fx.Graph, empty: torch.fx.Graph) -> None:
    """Copy every node into an empty graph, with the source that Dynamo gave to placeholders."""
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in source.nodes:
        twins[node] = empty.node_copy(node, twins.__getitem__)
        _torch.sources.carry_node_source(node, twins[node])
