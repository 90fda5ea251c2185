"""The key that a graph is known by, and the text that it is made of."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import attribute_at, value_of
from composer.records import GraphRequest


def with_key(request: GraphRequest, name: str | None, settings: str) -> GraphRequest:
    """The request with its key, and with the user's own name for the model if there is one.

    Args:
        request: What was read.
        name: By default the class of the module, or the function, whose frame is compiled.
        settings: Text of everything else that the key depends on.
    """
    text = _text(request.gm, settings, request.example_inputs)
    among_ranks = _digest(_as_on_every_rank(text)) if _torch.ranks.world_size() > 1 else ""
    return dataclasses.replace(
        request,
        model=name or request.model,
        graph_key=_digest(text),
        key_among_ranks=among_ranks,
    )


def graph_key(
    gm: torch.fx.GraphModule, settings: str = "", example_inputs: Sequence[Any] = ()
) -> str:
    """SHA-256 over every operation, argument, shape, dtype, stride and device of the graph.

    Names of nodes and symbols are replaced by their position, so that the key is equal in
    every process that captures the same graph.

    Args:
        gm: The graph.
        settings: Text of everything else that the key depends on.
        example_inputs: What stands for placeholders that do not say what they hold: those of a
            graph that did not come from Dynamo.
    """
    return _digest(_text(gm, settings, example_inputs))


def parts_of(request: GraphRequest, settings: Mapping[str, str]) -> dict[str, str]:
    """Text of all that the key is made of, part by part, so that a difference can be named.

    It is the same on all ranks of ``torch.distributed``. The parts are ``surroundings`` (grad and
    forward mode, autocast, default dtype), ``inputs``, ``weights``, ``operations`` and those of the
    settings.

    Args:
        request: The captured graph, in the surroundings that it is compiled in.
        settings: Text of everything else that the key depends on, by name.
    """
    graph = request.gm.graph
    held = {
        node: "weights" if i in request.weights else "inputs"
        for i, node in enumerate(graph.find_nodes(op="placeholder"))
    }
    names = ["surroundings", *(held.get(node, "operations") for node in graph.nodes), *settings]
    lines = (line.replace("\n", " ") for line in _lines(request.gm, request.example_inputs))
    said = (_without_address(each.replace("\n", " ")) for each in settings.values())
    text = "\n".join((normalized("\n".join(lines)), *said))
    parts: dict[str, list[str]] = {name: [] for name in ("surroundings", "inputs", "weights")}
    for name, line in zip(names, _as_on_every_rank(text).split("\n"), strict=True):
        # Where a placeholder stands among the others is told by the operations that read it.
        own = line.partition(" ")[2] if name in ("inputs", "weights") else line
        parts.setdefault(name, []).append(own)
    return {name: "\n".join(own) for name, own in parts.items()}


def normalized(text: str) -> str:
    """A text without addresses, and with the names of symbols replaced by their position."""
    symbols: dict[str, str] = {}
    return re.sub(
        r"\b[su]\d+\b",
        lambda m: symbols.setdefault(m[0], f"sym{len(symbols)}"),
        _without_address(text),
    )


def _text(gm: torch.fx.GraphModule, settings: str, example_inputs: Sequence[Any]) -> str:
    graph = normalized("\n".join(_lines(gm, example_inputs)))
    return f"{graph}\n{_without_address(settings)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_OWN_TO_A_RANK = (
    r"(device\(type='\w+', index=|\b(?:cuda|xpu|hpu|npu|mtia):)(\d+)",
    r"(\b_?c10d_functional\S* \(\"\([^\"]*)'([^'\"]*)'(?=\)\")",
)
"""The number of a device, and the name of the group that a collective runs in, always its last
argument: ranks that do the same work differ in both."""


def _as_on_every_rank(text: str) -> str:
    """A graph's text with the above replaced by their position."""
    for pattern in _OWN_TO_A_RANK:
        names = dict.fromkeys(found[2] for found in re.finditer(pattern, text))
        seen = {name: position for position, name in enumerate(names)}
        text = re.sub(pattern, functools.partial(_by_position, seen), text)
    return text


def _by_position(seen: Mapping[str, int], found: re.Match[str]) -> str:
    return f"{found[1]}#{seen[found[2]]}"


def _lines(gm: torch.fx.GraphModule, example_inputs: Sequence[Any] = ()) -> Iterator[str]:
    autocast, dtype = _torch.modes.autocasts(), torch.get_default_dtype()
    forward = " forward-mode" if _torch.modes.is_forward_mode() else ""
    yield f"grad={torch.is_grad_enabled()}{forward} autocast={autocast} {dtype}"
    position = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False))
    for node in gm.graph.nodes:
        args = _argument(node.args, position), _argument(dict(node.kwargs), position)
        held = _held(node, given.get(node)) if node.op == "placeholder" else ""
        yield f"{position[node]} {node.op} {_target(gm, node)} {args} {held}"


def _target(gm: torch.fx.GraphModule, node: torch.fx.Node) -> str:
    if node.op == "call_function":
        return _qualified(node.target)
    if node.op in ("get_attr", "call_module"):
        value = attribute_at(gm, str(node.target))
        if isinstance(value, torch.fx.GraphModule):
            return "graph(" + "; ".join(_lines(value)) + ")"
        return _tensor(value) if isinstance(value, torch.Tensor) else f"{node.target}: {value!r}"
    return str(node.target) if node.op == "call_method" else ""


def _held(node: torch.fx.Node, given: Any) -> str:
    """What a placeholder stands for; ``given`` is used where the graph does not say."""
    value = value_of(node, given)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    kind = type(value).__name__
    return f"{kind} {value}" if kind == "SymInt" else kind


def _tensor(value: torch.Tensor) -> str:
    """What of a tensor a graph is compiled for; of most nothing but the first line is to be said.

    A class of its own may run other operators, and so may a view that is yet to be computed.
    """
    layout = value.stride() if value.layout is torch.strided else value.layout
    sizes = tuple(map(str, value.shape)), layout, value.dtype, value.device, value.requires_grad
    special = [] if type(value) in _torch.tensors.PLAIN_TENSORS else [_qualified(type(value))]
    special += ["conjugate"] * value.is_conj() + ["negative"] * value.is_neg()
    return f"tensor{sizes}{' '.join(special)}"


def _argument(value: Any, position: Mapping[torch.fx.Node, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return position[value]
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return f"slice{_argument(parts, position)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_argument(v, position)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_argument(item, position) for item in value) + ")"
    if callable(value):
        return _qualified(value)
    return _without_address(repr(value))


def _qualified(target: Any) -> str:
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if isinstance(target, _torch.operators.OpOverload) or name is None:
        return _without_address(str(target))
    return f"{getattr(target, '__module__', '')}.{name}"


def _without_address(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)
