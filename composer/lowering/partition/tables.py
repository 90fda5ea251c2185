"""Tables that are read by position: embeddings, and the position biases of windowed attention.

Eager raises for a position outside the table. Some engines do not, so they need the table's size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

aten = torch.ops.aten


def table_sizes(gm: torch.fx.GraphModule) -> dict[int, int]:
    """Return the size of the table, by the index of each placeholder that holds positions.

    If positions are read in several tables, it is the smallest size.
    """
    number = {each: i for i, each in enumerate(gm.graph.find_nodes(op="placeholder"))}
    found: dict[int, int] = {}
    for node in gm.graph.nodes:
        for index, size in positions_of(node):
            if index in number:
                at = number[index]
                found[at] = min(size, found.get(at, size))
    return found


def positions_of(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, int]]:
    """Yield each int64 tensor of positions that a call reads, and the size of the table."""
    if node.target not in (aten.index.Tensor, aten.embedding.default):
        return
    table, indices, *_ = node.args
    if isinstance(indices, torch.fx.Node):
        indices = [indices]
    assert isinstance(table, torch.fx.Node)
    assert isinstance(indices, list | tuple)
    for index, size in zip(indices, table.meta["val"].shape, strict=False):
        if not isinstance(index, torch.fx.Node) or not isinstance(size, int):
            continue
        if index.meta["val"].dtype is torch.int64:
            yield index, size
