"""Facts about a graph that Dynamo captured."""

from __future__ import annotations

import dataclasses
import inspect
import os
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.errors import first_line
from composer.records import GraphInput, GraphRequest, WithoutGraph

_OWN = (Path(inspect.getfile(torch)).parent, Path(__file__).parents[1])
_MACHINERY = ("<frozen", *(f"{folder}{os.sep}" for folder in _OWN))

_NAME = "composer_model"
"""The key in a graph's metadata for the name of the model; graphs from Dynamo do not have it."""

_OPERATIONS = frozenset({"call_function", "call_method", "call_module"})


def read_request(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
) -> GraphRequest:
    """The facts about a captured graph that all later steps use.

    Args:
        gm: The graph, as Dynamo or a direct caller handed it over; it is not changed.
        example_inputs: Real tensors and symbols, in the order of the placeholders.
        mode: ``torch.compile``'s mode.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    fakes = _torch.sources.example_values(gm)
    weights = _positions(gm, example_inputs, _is_weight)
    tensors = [*_torch.tensors.tensors_among(example_inputs), *gm.parameters(), *gm.buffers()]
    floating = [each for each in tensors if each.is_floating_point()]
    needs_backward = any(each.requires_grad for each in tensors)
    activations = [i for i in range(len(placeholders)) if i not in weights]
    model = model_name(gm)
    return GraphRequest(
        gm=gm,
        example_inputs=tuple(example_inputs),
        weights=weights,
        graph_id=_torch.dynamo.compile_id() or "direct",
        graph_key="",
        model=model,
        names=(model, _name_of_called()),
        device=_most_common((str(each.device) for each in tensors), default="cpu"),
        dtype=_most_common(map(dtype_name, floating or tensors)),
        training=torch.is_grad_enabled() and needs_backward,
        dynamic=any(map(_torch.symbols.symbolic_numbers, fakes)),
        nodes=sum(node.op in _OPERATIONS for node in gm.graph.nodes),
        inputs=tuple(_describe(placeholders[i], example_inputs[i]) for i in activations),
        torch_gm=gm,
        mode=mode,
    )


def lasting_weights(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    """Positions of the weights that an engine may keep as constants.

    Tensors that the program marked as static, such as caches, are left out: their addresses are
    fixed, but their values change.
    """

    def is_lasting(node: torch.fx.Node, value: Any) -> bool:
        is_parameter = isinstance(value, torch.nn.Parameter)
        is_marked = _torch.dynamo.is_marked_by_program(node)
        return _is_weight(node, value) and (is_parameter or not is_marked)

    return _positions(gm, example_inputs, is_lasting)


def _is_weight(node: torch.fx.Node, value: Any) -> bool:
    """True if an input is a parameter or buffer of the model."""
    return isinstance(value, torch.nn.Parameter) or _torch.dynamo.is_static_input(node)


def _positions(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    is_counted: Callable[[torch.fx.Node, Any], bool],
) -> frozenset[int]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = enumerate(zip(placeholders, example_inputs, strict=True))
    return frozenset(i for i, (node, value) in inputs if is_counted(node, value))


def model_name(gm: torch.fx.GraphModule) -> str:
    """The qualified name of the module class, or of the function, whose frame is compiled.

    It is also right for the graphs after a graph break. A graph that did not come from Dynamo gets
    the name from :func:`set_model_name`, else that of its own class.
    """
    traced = _torch.dynamo.traced_frame()
    if traced is None:
        return str(gm.meta.get(_NAME, type(gm).__name__))
    return _name_of_frame(traced)


def _name_of_called() -> str:
    """The name of the module or function that the program compiled and calls now.

    After a graph break in a submodule, :func:`model_name` gives the name of that submodule instead.
    Empty if the program calls none.
    """
    called = _torch.dynamo.called_frame()
    return _name_of_frame(called) if called else ""


def _name_of_frame(frame: _torch.dynamo.UserFrame) -> str:
    code, scope, module = frame
    owner = _first_argument(code, scope)
    if isinstance(owner, torch.nn.Module) and _is_frame_of(owner, code):
        return f"{type(owner).__module__}.{type(owner).__qualname__}"
    named = code.co_qualname.removesuffix(".forward").removesuffix(".__call__")
    return f"{module}.{named}".lstrip(".")


def without_graph(uncaptured: _torch.breaks.Uncaptured) -> WithoutGraph:
    """The record of a frame for which Dynamo captured no graph."""
    place = users_frame(uncaptured.stack)
    reason = first_line(uncaptured.message)
    return WithoutGraph(
        name=_name_of_frame(uncaptured.frame),
        reason=reason or "Dynamo captured nothing, and does not say why",
        file=place.filename,
        line=place.lineno or 0,
        given_up=uncaptured.given_up,
    )


def users_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """The innermost frame that is neither torch's nor composer's.

    If the stack has no such frame, the stack of the caller of this function is searched.
    """
    frames = [*reversed(stack), *reversed(traceback.extract_stack())]
    return next((f for f in frames if not f.filename.startswith(_MACHINERY)), frames[0])


def set_model_name(gm: torch.fx.GraphModule, name: str) -> None:
    """Set the model name of a graph, used if there is no frame to read it from."""
    gm.meta[_NAME] = name


def _first_argument(code: types.CodeType, scope: Mapping[str, Any]) -> Any:
    """The first positional argument: ``self`` in a method, ``args[0]`` in a decorator's wrapper."""
    if code.co_argcount:
        return scope.get(code.co_varnames[0])
    if not code.co_flags & inspect.CO_VARARGS:
        return None
    arguments = scope.get(code.co_varnames[code.co_kwonlyargcount])
    if not isinstance(arguments, tuple):
        return None
    return next(iter(arguments), None)


def _is_frame_of(module: torch.nn.Module, code: types.CodeType) -> bool:
    """True if ``code`` is a method of the module, or a decorator's wrapper around one."""

    def is_method(value: Any) -> bool:
        method = _torch.dynamo.without_arguments(value)
        function = getattr(method, "__func__", method)
        return getattr(function, "__code__", None) is code

    methods: list[Any] = []
    for name in {"forward", code.co_name}:
        methods.append(vars(module).get(name))
        methods.append(inspect.getattr_static(type(module), name, None))
    return any(is_method(inspect.unwrap(each, stop=is_method)) for each in methods)


def _describe(node: torch.fx.Node, value: Any) -> GraphInput:
    if not isinstance(value, torch.Tensor):
        is_symbol = isinstance(value, torch.SymInt | torch.SymFloat)
        return GraphInput(node.name, "symbol" if is_symbol else "scalar")
    known = node.meta.get("example_value")
    shape = known.shape if isinstance(known, torch.Tensor) else value.shape
    sizes = tuple(map(_number_or_symbol, shape))
    return GraphInput(node.name, "tensor", sizes, dtype_name(value), str(value.device))


def _number_or_symbol(size: int | torch.SymInt) -> int | str:
    text = str(size)
    return int(text) if text.isdigit() else text


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of the tensor's dtype, such as ``"float32"`` for ``torch.float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def _most_common(names: Iterable[str], default: str = "") -> str:
    counts = Counter(names)
    return max(counts, key=counts.__getitem__, default=default)


def without_tensors(request: GraphRequest) -> GraphRequest:
    """Return the request with only the symbols as example inputs: tensors are released."""
    symbols = tuple(
        value if isinstance(value, torch.SymInt | torch.SymFloat) else None
        for value in request.example_inputs
    )
    return dataclasses.replace(request, example_inputs=symbols)


def for_call(request: GraphRequest, args: Sequence[Any]) -> GraphRequest:
    """Return a request without tensors as one with the inputs of a call."""
    inputs = zip(request.example_inputs, args, strict=True)
    given = tuple(arg if symbol is None else symbol for symbol, arg in inputs)
    return dataclasses.replace(request, example_inputs=given)
