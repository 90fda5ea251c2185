"""What a node of a graph stands for, as far as the graph knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from composer import _torch


def value_of(node: torch.fx.Node, otherwise: Any = None) -> Any:
    """The value that a node has while the graph is compiled: a fake tensor, a symbol, a number.

    Dynamo notes it under one name, tracing to ATen under another.

    Args:
        node: Of a captured graph, or of one that was traced.
        otherwise: What is given back for a node of which the graph does not know it.
    """
    return node.meta.get("example_value", node.meta.get("val", otherwise))


def described(value: Any, *, strides: bool = True) -> str:
    """What must agree for two fake values to be the same to whoever reads them; adds no guard."""
    if isinstance(value, torch.Tensor):
        kind = f"{value.dtype} {list(value.shape)} on {value.device}"
        if not strides:
            return kind
        if value.layout is not torch.strided:
            return f"{kind}, {value.layout}"
        return f"{kind}, strides {tuple(value.stride())}"
    if isinstance(value, list | tuple):
        return str([described(each, strides=strides) for each in value])
    return str(value)


def tensors_of(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a node stands for; of a Triton kernel of the program's, by name."""
    value = node.meta.get("val")
    if isinstance(value, dict):
        value = [*value.values()]
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


def attribute_at(gm: torch.nn.Module | None, path: str) -> object:
    """What a dotted path within the module leads to; ``None`` where it leads nowhere."""
    value: object = gm
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def drop_unread(graph: torch.fx.Graph) -> None:
    """Take out what nothing reads, and what has no effect."""
    graph.eliminate_dead_code(
        lambda node: node.is_impure() or _torch.operators.has_effect(node.target)
    )
