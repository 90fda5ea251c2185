"""Sorts the nodes of a graph so that each comes after its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch.fx


class Cycle(Exception):
    """A node needs its own result. ``node`` is one of the nodes on the cycle."""

    def __init__(self, node: torch.fx.Node) -> None:
        super().__init__(f"{node.name} needs its own result")
        self.node = node


def sort(graph: torch.fx.Graph) -> None:
    """Sort the graph in place so that every node comes after its inputs.

    Only nodes that have to move are moved. A sorted graph does not change.

    Raises:
        Cycle: There is no such order.
    """
    if is_sorted(graph):
        return
    order: list[torch.fx.Node] = []
    placed: set[torch.fx.Node] = set()
    for node in graph.nodes:
        needed = _needed(node, placed)
        placed.update(needed)
        order += needed
    next(iter(graph.nodes)).prepend(order[0])
    for before, after in itertools.pairwise(order):
        before.append(after)


def moved_across(
    before: Sequence[torch.fx.Node],
    after: Sequence[torch.fx.Node],
    is_barrier: Callable[[torch.fx.Node], bool],
) -> torch.fx.Node | None:
    """Return the first node that moved across a barrier, or ``None``.

    A barrier is a node that other nodes must not be moved across.
    """
    if before == after:
        return None
    barriers = set(filter(is_barrier, after))
    passed_before, passed_now = _counted(before, barriers), _counted(after, barriers)
    moved = [node for node in after if passed_now[node] != passed_before[node]]
    return next(iter(moved), None)


def _counted(
    nodes: Sequence[torch.fx.Node], barriers: set[torch.fx.Node]
) -> dict[torch.fx.Node, int]:
    """Return the number of barriers before each node."""
    found = itertools.accumulate((node in barriers for node in nodes), initial=0)
    return dict(zip(nodes, found, strict=False))


def is_sorted(graph: torch.fx.Graph) -> bool:
    """True if every node comes after its inputs."""
    seen: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return False
        seen.add(node)
    return True


def can_read(node: torch.fx.Node, sources: Iterable[torch.fx.Node]) -> bool:
    """True if all the sources are inputs, attributes, or computed before the node."""
    computed = [each for each in sources if each.op not in ("placeholder", "get_attr")]
    return all(each < node for each in computed)


def _needed(node: torch.fx.Node, placed: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return the node and all nodes that it needs, sorted, without those in ``placed``."""
    if node in placed:
        return []
    order: dict[torch.fx.Node, None] = {}
    path = {node: iter(node.all_input_nodes)}
    while path:
        current = next(reversed(path))
        source = next((s for s in path[current] if s not in placed and s not in order), None)
        if source is None:
            path.popitem()
            order[current] = None
        elif source in path:
            raise Cycle(source)
        else:
            path[source] = iter(source.all_input_nodes)
    return list(order)
