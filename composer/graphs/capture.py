"""What Dynamo handed over: facts about the graph, and the key it is known by."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import re
import traceback
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.errors import first_line
from composer.graphs.nodes import attribute_at, value_of
from composer.records import GraphInput, GraphRequest, WithoutGraph

_OWN = (Path(inspect.getfile(torch)).parent, Path(__file__).parents[1])
_MACHINERY = ("<frozen", *(f"{folder}{os.sep}" for folder in _OWN))

_NAME = "composer_model"
"""Where a graph says what the model is called; Dynamo's do not."""

_OPERATIONS = frozenset({"call_function", "call_method", "call_module"})


def read_request(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
) -> GraphRequest:
    """Gather what every later step asks about a captured graph.

    Args:
        gm: The graph, as Dynamo or a direct caller handed it over; it is not changed.
        example_inputs: Real tensors and symbols, in the order of the placeholders.
        mode: ``torch.compile``'s mode.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    weights = weight_positions(gm, example_inputs)
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    tensors += [*gm.parameters(), *gm.buffers()]
    model = model_name(gm)
    return GraphRequest(
        gm=gm,
        example_inputs=tuple(example_inputs),
        weights=weights,
        graph_id=_torch.dynamo.compile_id() or "direct",
        graph_key="",
        model=model,
        names=(model, _name_of_called()),
        device=_most_common(str(t.device) for t in tensors) or "cpu",
        dtype=_most_common(dtype_name(t) for t in tensors if t.is_floating_point())
        or _most_common(dtype_name(t) for t in tensors),
        training=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        dynamic=any(_is_dynamic(node) for node in placeholders),
        nodes=sum(node.op in _OPERATIONS for node in gm.graph.nodes),
        inputs=tuple(
            _describe(node, value)
            for i, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
            if i not in weights
        ),
        mode=mode,
    )


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


def weight_positions(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    """Positions of the inputs that are parameters or buffers of the model."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return frozenset(
        i
        for i, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
        if isinstance(value, torch.nn.Parameter) or _torch.dynamo.is_static_input(node)
    )


def lasting_weights(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    """Those that an engine may take in: not the caches, whose addresses only are fixed."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return frozenset(
        i
        for i in weight_positions(gm, example_inputs)
        if isinstance(example_inputs[i], torch.nn.Parameter)
        or not _torch.dynamo.is_marked_by_program(placeholders[i])
    )


def model_name(gm: torch.fx.GraphModule) -> str:
    """The qualified name of the module class, or the function, whose frame is compiled.

    Also right for the graphs after a graph break. A graph that did not come from Dynamo has
    its own class's name.
    """
    traced = _torch.dynamo.traced_frame()
    if traced is None:
        return str(gm.meta.get(_NAME, type(gm).__name__))
    return _name_of_frame(*traced)


def _name_of_called() -> str:
    """That of the module, or the function, that the program compiled and calls now.

    It is another than :func:`model_name` has behind a graph break in one of its submodules. Empty
    where the program calls none.
    """
    called = _torch.dynamo.called_frame()
    return _name_of_frame(*called) if called else ""


def _name_of_frame(code: types.CodeType, scope: Mapping[str, Any], module: str) -> str:
    owner = _first_argument(code, scope)
    if isinstance(owner, torch.nn.Module) and _is_frame_of(owner, code):
        return f"{type(owner).__module__}.{type(owner).__qualname__}"
    named = code.co_qualname.removesuffix(".forward").removesuffix(".__call__")
    return f"{module}.{named}".lstrip(".")


def without_graph(found: _torch.breaks.Uncaptured) -> WithoutGraph:
    """The record of what Dynamo captured no graph of."""
    place = users_frame(found.stack)
    return WithoutGraph(
        name=_name_of_frame(*found.frame),
        reason=first_line(found.message) or "Dynamo captured nothing, and does not say why",
        file=place.filename,
        line=place.lineno or 0,
        given_up=found.given_up,
    )


def users_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """The innermost frame that is neither torch's nor composer's; of the caller's if none is."""
    frames = [*reversed(stack), *reversed(traceback.extract_stack())]
    return next((f for f in frames if not f.filename.startswith(_MACHINERY)), frames[0])


def set_model_name(gm: torch.fx.GraphModule, name: str) -> None:
    """Say what the model of a graph is called, for when there is no frame to read it from."""
    gm.meta[_NAME] = name


def _first_argument(code: types.CodeType, scope: Mapping[str, Any]) -> Any:
    """``self``, as it is called in most methods; the first of ``*args`` in a decorator's."""
    if code.co_argcount:
        return scope.get(code.co_varnames[0])
    if code.co_flags & inspect.CO_VARARGS:
        given = scope.get(code.co_varnames[code.co_kwonlyargcount])
        return given[0] if isinstance(given, tuple) and given else None
    return None


def _is_frame_of(module: torch.nn.Module, code: types.CodeType) -> bool:
    """Whether ``code`` is a method of the module, or a decorator's function around one."""
    for name in {"forward", code.co_name}:
        for found in (vars(module).get(name), inspect.getattr_static(type(module), name, None)):
            method = found
            while method is not None:
                function = method.func if isinstance(method, functools.partial) else method
                function = getattr(function, "__func__", function)
                if getattr(function, "__code__", None) is code:
                    return True
                method = getattr(method, "__wrapped__", None)
    return False


def _describe(node: torch.fx.Node, value: Any) -> GraphInput:
    if isinstance(value, torch.Tensor):
        known = node.meta.get("example_value", value)
        shape = known.shape if isinstance(known, torch.Tensor) else value.shape
        sizes = tuple(int(text) if (text := str(size)).isdigit() else text for size in shape)
        return GraphInput(node.name, "tensor", sizes, dtype_name(value), str(value.device))
    kind = "symbol" if isinstance(value, torch.SymInt | torch.SymFloat) else "scalar"
    return GraphInput(node.name, kind)


def _is_dynamic(node: torch.fx.Node) -> bool:
    known = node.meta.get("example_value")
    if isinstance(known, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in known.shape)
    return isinstance(known, torch.SymInt | torch.SymFloat)


def dtype_name(tensor: torch.Tensor) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def _most_common(names: Iterable[str]) -> str:
    ranked = Counter(names).most_common(1)
    return ranked[0][0] if ranked else ""


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
