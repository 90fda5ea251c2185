"""A functional graph as plain data that JSON can hold: to read it back runs no code of the file."""

from __future__ import annotations

import operator
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch.fx.node import map_aggregate

from composer import _torch
from composer.graphs.written import Unsayable

_GETITEM = "getitem"

_KINDS: dict[type, str] = {
    torch.fx.Node: "node",
    torch.device: "device",
    float: "float",
    **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), "torch"),
}
"""What a value is that JSON does not know, or not exactly, by its class."""

_READERS: dict[str, Callable[[str], Any]] = {
    "device": torch.device,
    "float": float,
    "torch": pkgutil.resolve_name,
}
"""Make a value of its text, by what it is."""


def rows_of(graph: torch.fx.Graph) -> list[list[Any]]:
    """Return a row of operation, name, target, arguments and keyword arguments for each node.

    Raises:
        Unsayable: a node calls something else than torch's own operators, or a value among its
            arguments has no plain form.
    """
    return [[node.op, node.name, _target_of(node), *_arguments_of(node)] for node in graph.nodes]


def graph_of(rows: Sequence[Sequence[Any]]) -> torch.fx.Graph:
    """Return the graph of which :func:`rows_of` returned these rows."""
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    for op, name, target, args, kwargs in rows:
        found = _function(target) if op == "call_function" else target
        given = tuple(_value(each, nodes) for each in args)
        named = {key: _value(each, nodes) for key, each in kwargs.items()}
        nodes[name] = graph.create_node(op, found, given, named, name)
    return graph


def _target_of(node: torch.fx.Node) -> str:
    target: Any = node.target
    if node.op != "call_function":
        return str(target)
    if target is operator.getitem:
        return _GETITEM
    if isinstance(target, _torch.operators.OpOverload) and target.namespace in ("aten", "prims"):
        return str(target)
    raise Unsayable(f"{target} is not torch's own operator")


def _function(path: str) -> Any:
    return operator.getitem if path == _GETITEM else operator.attrgetter(path)(torch.ops)


def _arguments_of(node: torch.fx.Node) -> tuple[Any, Any]:
    args, kwargs = map_aggregate(cast(Any, (node.args, node.kwargs)), _data)
    return list(args), dict(kwargs)


def _data(value: Any) -> Any:
    """Return a value that is no list as JSON holds it; what JSON does not know is a small dict."""
    if type(value) in (str, bool, int, type(None)):
        return value
    kinds = map(_KINDS.get, type(value).__mro__)
    kind = next(filter(None, kinds), None)
    if kind is None:
        raise Unsayable(f"an argument is a {type(value).__qualname__}")
    return {kind: str(value)}


def _value(data: Any, nodes: Mapping[str, torch.fx.Node]) -> Any:
    if isinstance(data, list):
        return [_value(each, nodes) for each in data]
    if not isinstance(data, dict):
        return data
    ((kind, text),) = data.items()
    return nodes[text] if kind == "node" else _READERS[kind](text)
