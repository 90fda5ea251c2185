"""The values of the nodes of a graph, as far as the graph knows them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
import torch.fx

from composer import _torch


def value_of(node: torch.fx.Node, otherwise: Any = None) -> Any:
    """The value that a node has during compilation: a fake tensor, a symbol or a number.

    Args:
        node: A node of a graph that Dynamo captured (``meta["example_value"]``), or of a graph that
            was traced to ATen (``meta["val"]``).
        otherwise: Returned if the graph does not know the value.
    """
    return node.meta.get("example_value", node.meta.get("val", otherwise))


def described(value: Any, *, strides: bool = True) -> str:
    """A text of the properties that two fake values must share to be interchangeable.

    It adds no guard.

    Args:
        value: A fake tensor, a number, a symbol, or a list of these.
        strides: False to leave out strides and layout.
    """
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


def is_strided(value: object) -> TypeGuard[torch.Tensor]:
    """True for a tensor with strides, as no sparse one has."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def tensors_of(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors among a node's values; the values of a user's Triton kernel are a dict."""
    leaves, _ = _torch.tensors.flatten(node.meta.get("val"))
    yield from _torch.tensors.tensors_among(leaves)


def nodes_within(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes of a graph and of all graphs nested in it."""
    for each in graph_modules(gm):
        yield from each.graph.nodes


def placeholders_of(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The placeholders of a graph, in the order of its inputs."""
    return list(graph.find_nodes(op="placeholder"))


def returned_by(graph: torch.fx.Graph) -> list[Any]:
    """The values that a graph returns; a single value becomes a list of one."""
    (output,) = graph.find_nodes(op="output")
    value = output.args[0] if output.args else ()
    return list(value) if isinstance(value, list | tuple) else [value]


def paths_read(graph: torch.fx.Graph) -> list[str]:
    """The sorted paths of the tensors and modules of the graph module that the graph uses."""
    nodes = (*graph.find_nodes(op="get_attr"), *graph.find_nodes(op="call_module"))
    return sorted({str(node.target) for node in nodes})


def attribute_at(gm: torch.nn.Module | None, path: str) -> object:
    """The attribute at a dotted path within the module; ``None`` if there is none."""
    value: object = gm
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def graph_modules(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The graph module and those nested in it, such as the branches of ``torch.cond``."""
    return [each for each in gm.modules() if isinstance(each, torch.fx.GraphModule)]


def nested_graphs(gm: torch.nn.Module) -> dict[str, torch.fx.GraphModule]:
    """The graph modules that a module holds itself, by name."""
    children = gm.named_children()
    return {name: each for name, each in children if isinstance(each, torch.fx.GraphModule)}


def calls_of(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes that call a function."""
    return (node for node in gm.graph.nodes if node.op == "call_function")


def graphs_in(node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """The graphs that a call has as operands, such as the branches of ``torch.cond``."""
    owner = node.graph.owning_module
    constants = [source for source in node.all_input_nodes if source.op == "get_attr"]
    values = [attribute_at(owner, str(constant.target)) for constant in constants]
    return [value for value in values if isinstance(value, torch.fx.GraphModule)]


def call_behind(node: torch.fx.Node) -> Any:
    """The call that a node is one result of (``operator.getitem``), or else the node itself."""
    return node.args[0] if node.target is operator.getitem else node


def is_pointwise(node: torch.fx.Node) -> bool:
    """True if a node calls an elementwise operator."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def are_static(sizes: Iterable[Any]) -> bool:
    """True if all sizes or strides are known numbers, so that none of them is a symbol."""
    return all(isinstance(size, int) for size in sizes)


def drop_unread(graph: torch.fx.Graph) -> None:
    """Remove the nodes that have no users and no effect."""
    graph.eliminate_dead_code(
        lambda node: node.is_impure() or _torch.operators.has_effect(node.target)
    )
