"""A graph as text, so complete that two graphs with the same text become the same ONNX model.

Unlike :func:`composer.graphs.keys.graph_key`, which may leave things out, this refuses whatever
it cannot express completely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch

_NAMESPACES = ("aten", "prims", "composer")
"""Operators that torch or composer brings, so that their names and versions say what they do."""

_WORDS = (str, bool, int, float, complex, type(None), type(Ellipsis))
_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unsayable(Exception):
    """A graph holds something that no text can express completely."""


def graph_text(gm: torch.fx.GraphModule, inputs: Sequence[Any] | None = None) -> str:
    """The text of a graph.

    Args:
        gm: A graph whose nodes have values (``meta["val"]``), or a captured one.
        inputs: What is given to a captured graph, whose nodes need no values then.

    Raises:
        Unsayable: saying what is in the way.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = None if inputs is None else dict(zip(placeholders, inputs, strict=True))
    return "\n".join(_line(node, given) for node in gm.graph.nodes)


def _line(node: torch.fx.Node, given: Mapping[torch.fx.Node, Any] | None) -> str:
    if node.op not in ("placeholder", "call_function", "call_method", "output"):
        raise Unsayable(f"the graph holds {node.target!r} itself")
    said = f"%{node.name} {node.op} {_target(node)} {_argument(node.args)} {_argument(node.kwargs)}"
    if given is None:
        return f"{said} {'' if node.op == 'output' else _value(node.meta.get('val'))}"
    if node.op != "placeholder":
        return said
    return f"{said} {_torch.dynamo.is_static_input(node)} {_value(given[node])}"


def _target(node: torch.fx.Node) -> str:
    if node.op == "call_method" and not _torch.operators.is_method_of_torch(str(node.target)):
        raise Unsayable(f"{node.target!r} is no method of torch's own")
    if node.op != "call_function":
        return str(node.target)
    if isinstance(node.target, _torch.operators.OpOverload):
        if node.target.namespace not in _NAMESPACES:
            raise Unsayable(f"{node.target} is not torch's own operator")
        return str(node.target)
    path = _torch.operators.path_in_torch(node.target)
    if path is None or _torch.modes.changes_state(node.target):
        raise Unsayable(f"{node.target!r} is no plain function of torch's own")
    return path


def _argument(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if type(value) in _WORDS:
        return repr(value)
    if isinstance(value, _NAMES):
        return str(value)
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step))}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_argument(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        brackets = "[]" if isinstance(value, list) else "()"
        return f"{brackets[0]}{', '.join(map(_argument, value))}{brackets[1]}"
    raise Unsayable(f"an argument is a {type(value).__qualname__}")


def _value(value: Any) -> str:
    """What a node stands for: no data, but all else that can be seen of it."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))})"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, torch.SymInt):
        facts = sorted(_torch.symbols.symbol_facts(value).items())
        return f"{value} {_torch.symbols.usual(value)} {facts}"
    if type(value) in _WORDS:
        return repr(value)
    raise Unsayable(f"a value is a {type(value).__qualname__}")


def _tensor(value: torch.Tensor) -> str:
    if type(value) not in _torch.tensors.PLAIN_TENSORS or value.layout is not torch.strided:
        raise Unsayable(f"a tensor is a {type(value).__qualname__}, {value.layout}")
    sizes = [_value(size) for size in (*value.shape, *value.stride(), value.storage_offset())]
    flags = value.requires_grad, value.is_inference(), value.is_neg(), value._is_zerotensor()
    kind = type(value).__name__
    return f"{kind}({sizes} {value.dtype} {value.device} {flags})"
