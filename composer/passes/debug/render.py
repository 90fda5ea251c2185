"""Renders a graph from before or after a pass as text: a Python file that runs, or a table.

Values of weights are not included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.graphs import python
from composer.graphs.nodes import described
from composer.graphs.written import Word, rows
from composer.passes.metadata import key_at
from composer.passes.snapshot import Snapshot
from composer.records import Stage

if TYPE_CHECKING:
    import torch.fx


def as_python(snapshot: Snapshot, stage: Stage | str, title: str) -> str:
    """Return a Python file with inputs of the graph's shapes and dtypes.

    ``title`` becomes the docstring.
    """
    key = key_at(stage)

    def value_at(node: torch.fx.Node, held: object) -> str:
        return python.expression(node.meta.get(key) if held is None else held)

    return python.as_python(snapshot.copy, snapshot.module(), title, value_at)


def as_table(snapshot: Snapshot, stage: Stage | str, title: str) -> str:
    """Return a table with a row for each node: name, operation, target, arguments, fake value."""
    gm, key = snapshot.graph_module(), key_at(stage)
    names = {node: Word(node.name) for node in gm.graph.nodes}
    table: list[tuple[str, ...]] = [("name", "op", "target", "args", "kwargs", "value")]
    for node, row in zip(gm.graph.nodes, rows(gm, names), strict=True):
        table.append((*row, described(node.meta[key]) if key in node.meta else ""))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [title, ""]
    for row in table:
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    return "\n".join((*lines, ""))
