"""The compile that Dynamo runs now, and Dynamo's registry of backends."""

from __future__ import annotations

import functools
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.fx
from torch._dynamo import lookup_backend as lookup_backend
from torch._dynamo import register_backend as register_backend
from torch._dynamo.exc import InvalidBackend as InvalidBackend
from torch._dynamo.exc import RestartAnalysis, SkipFrame

from composer._torch.names import optional

DYNAMO_CONTROL_FLOW: tuple[type[Exception], ...] = (RestartAnalysis, SkipFrame)
"""Exceptions by which Dynamo restarts or skips a frame. They pass through a backend, and are not
failures of an engine."""


def list_backends() -> list[str]:
    """Every name that :func:`lookup_backend` knows, the debugging ones included."""
    return torch.compiler.list_backends(exclude_tags=())


@optional(
    "a new decision of the ranks after torch.compiler.reset()",
    "torch._dynamo.eval_frame:cached_backends",
)
def at_next_reset(told: Callable[[], None]) -> None:
    """Call ``told`` once at the next ``torch.compiler.reset()``, however often it is asked for.

    Torch calls ``reset`` of the backends that it has noted, and then forgets them. It notes a
    backend only when a function is wrapped, and not when the function is compiled again.
    """
    from torch._dynamo.eval_frame import cached_backends

    noted: Any = types.SimpleNamespace(reset=told)
    cached_backends.setdefault(id(told), noted)


@optional(
    "composer run --override",
    "torch._dynamo.config:debug_backend_override",
    without=lambda rule: False,
)
def override_backend(rule: str) -> bool:
    """Set which backend compiles which graph, whatever backend the program names.

    Args:
        rule: Text in the format of the environment variable ``TORCH_COMPILE_OVERRIDE_BACKENDS``.
            Torch reads that variable only when it is imported.

    Returns:
        True if this torch has such a setting.
    """
    torch._dynamo.config.debug_backend_override = rule
    return True


@optional(
    "a backend that the program registered by a name of composer's",
    "torch._dynamo.backends.registry:_COMPILER_FNS",
)
def registered_backend(name: str) -> Callable[..., Any] | None:
    """The backend registered under a name.

    Returns:
        ``None`` if there is no such backend, or if it is an entry point that is not loaded yet.
    """
    from torch._dynamo.backends.registry import _COMPILER_FNS

    return _COMPILER_FNS.get(name)


@optional(
    "Dynamo's id of each compile in the record",
    "torch._guards:CompileContext.current_compile_id",
)
def compile_id() -> str | None:
    """Dynamo's compile id (``"0/0"``), ``None`` outside of a compile."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return None if current is None else str(current)


class UnderWay(NamedTuple):
    """What Dynamo says of the compile that it runs now.

    Attributes:
        seconds: The time since it began, Dynamo's capture included; ``None`` if torch tells none.
        reason: Why the code is compiled again; empty if it is not, or torch gives no reason.
    """

    seconds: float | None = None
    reason: str = ""


@optional(
    "Dynamo's reason for a recompile, and how long a call waited",
    "torch._dynamo.utils:get_metrics_context",
    without=UnderWay,
)
def under_way() -> UnderWay:
    """The compile that Dynamo runs now in this thread; without values if there is none."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    if not context.in_progress():
        return UnderWay()
    reason = getattr(context, "_metrics", {}).get("recompile_reason")
    started = getattr(context, "_start_time_ns", None)
    seconds = None if started is None else max(0, time.time_ns() - started) / 1e9
    return UnderWay(seconds, str(reason or ""))


@optional(
    "the count of graphs that a call captured anew",
    "torch._dynamo.utils:counters",
    without=lambda: 0,
)
def captured_graphs() -> int:
    """The number of graphs that Dynamo gave to any backend since this process started."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


_CALL = "torch.nn:Module._call_impl"
_TRANSLATOR = "torch._dynamo.symbolic_convert:InstructionTranslator.current_tx"
FRAMES = (
    _TRANSLATOR,
    "torch._dynamo.aot_compile:aot_compile_fullgraph.__code__",
    "torch._dynamo.external_utils:__file__",
    "torch._dynamo.resume_execution:ContinueExecutionCache.generated_code_metadata",
    _CALL,
)


class UserFrame(NamedTuple):
    """A frame of the user's program that runs, or one that a call would make.

    Attributes:
        code: The code as the user wrote it.
        scope: The local variables. For a call that was not made, only the first argument.
        module: The name of the module in which the function is defined.
    """

    code: types.CodeType
    scope: Mapping[str, Any]
    module: str


@optional("the name of the class that is compiled", *FRAMES)
def traced_frame() -> UserFrame | None:
    """The user's frame for which Dynamo compiles now; ``None`` outside of a compile.

    ``aot_compile`` calls the backend after tracing. Then the result is the frame of the model that
    it was asked to compile.
    """
    from torch._dynamo import aot_compile
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        root = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # nothing is being traced on this thread
        saving = aot_compile.aot_compile_fullgraph.__code__
        return _frame_of_call(locals_on_the_stack(saving).get("model"))
    return user_frame(root)


def user_frame(frame: Any) -> UserFrame:
    """The user's frame for a frame that Dynamo converts.

    In two cases Dynamo does not convert the user's frame itself:

    - For ``torch.compile(torch.nn.Linear(...))``, Dynamo converts a wrapper of torch's around the
      callable ``fn``. The result is the frame of the module's ``forward``. A function in C has no
      frame; then the result carries the function's name.
    - After a graph break, Dynamo converts a generated function that continues in the middle of the
      user's function. Its metadata lead back to the user's code. The user's frame still waits on
      the Python stack, and the locals are read from there.
    """
    from torch._dynamo import external_utils
    from torch._dynamo.resume_execution import ContinueExecutionCache

    module = str(frame.f_globals.get("__name__", ""))
    if frame.f_code.co_filename == external_utils.__file__:
        function: Any = frame.f_locals.get("fn")
        called = _frame_of_call(function)
        if called is not None:
            return called
        if hasattr(function, "__name__"):
            code = frame.f_code.replace(co_qualname=function.__name__)
            return UserFrame(code, {}, function.__module__ or "torch")
    interrupted = ContinueExecutionCache.generated_code_metadata.get(frame.f_code)
    if interrupted is not None:
        return UserFrame(interrupted.code, locals_on_the_stack(interrupted.code), module)
    return UserFrame(frame.f_code, frame.f_locals, module)


@optional(
    "the name of what the program compiled, behind a graph break in a part of it",
    "torch._dynamo.eval_frame:_TorchDynamoContext.__call__",
    "torch._dynamo.external_utils:__file__",
    _CALL,
)
def called_frame() -> UserFrame | None:
    """The frame of the callable that the program gave ``torch.compile`` and calls now.

    :func:`traced_frame` is another one after a graph break in a submodule, because Dynamo then
    traces the submodule's ``forward`` by itself.
    """
    from torch._dynamo import external_utils

    called: Any = locals_on_the_stack(_call_of_compiled()).get("fn")
    code = getattr(called, "__code__", None)
    if code is not None and code.co_filename == external_utils.__file__:
        called = called.__wrapped__
    return _frame_of_call(called)


def without_arguments(function: Any) -> Any:
    """The function that a ``functools.partial`` calls; any other object as it is."""
    return function.func if isinstance(function, functools.partial) else function


def _frame_of_call(called: Any) -> UserFrame | None:
    """The frame that a call would make; ``None`` if ``called`` has no Python code."""
    method = without_arguments(called.forward if isinstance(called, torch.nn.Module) else called)
    if callable(method) and not hasattr(method, "__code__"):  # an instance of a class with __call__
        method = method.__call__
    function = getattr(method, "__func__", method)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return None
    owner = getattr(method, "__self__", None)
    if function in (torch.nn.Module.__call__, torch.nn.Module._call_impl):
        return _frame_of_call(owner)  # Dynamo does not compile what calls a module's forward
    return UserFrame(code, dict.fromkeys(code.co_varnames[:1], owner), function.__module__)


@functools.cache
def _call_of_compiled() -> types.CodeType:
    """The code of the function that ``torch.compile`` returns."""
    from torch._dynamo import eval_frame

    constants = eval_frame._TorchDynamoContext.__call__.__code__.co_consts
    functions = (each for each in constants if isinstance(each, types.CodeType))
    return {code.co_name: code for code in functions}["compile_wrapper"]


@optional(
    "the line of the call in a warning of a failure at run time",
    "torch._dynamo.convert_frame:output_codes",
    without=lambda code: False,
)
def is_generated(code: types.CodeType) -> bool:
    """True if Dynamo has made the code, in place of the user's or to go on after a graph break."""
    from torch._dynamo.convert_frame import output_codes

    return code in output_codes


def locals_on_the_stack(code: types.CodeType) -> dict[str, Any]:
    """The locals of the nearest running frame of ``code``; empty if there is none.

    Dynamo runs a rewritten copy of the code. Frames are therefore compared by file, line and name.
    """
    place = _place(code)
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if _place(frame.f_code) == place:
            return dict(frame.f_locals)
    return {}


def _place(code: types.CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def is_static_input(node: torch.fx.Node) -> bool:
    """True if Dynamo marked the placeholder as static, that is, fixed in place between calls."""
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def is_marked_by_program(node: torch.fx.Node) -> bool:
    """True if the program itself marked the placeholder as static.

    Programs mark caches by ``torch._dynamo.mark_static_address``. Dynamo itself marks parameters,
    and tensors that it reads from a module.
    """
    source = getattr(node, "_dynamo_source", None)
    found = getattr(source, "guard_source", None)
    return found is not None and is_static_input(node) and "MODULE" not in found.name


@optional(
    "numbers that the program draws by Python's random, for engines that read by address",
    "torch._dynamo.source:RandomValueSource",
    without=lambda placeholder: False,
)
def is_random_number(placeholder: torch.fx.Node) -> bool:
    """True if the input is a number that the program draws by Python's ``random`` at each call."""
    from torch._dynamo.source import RandomValueSource

    return isinstance(getattr(placeholder, "_dynamo_source", None), RandomValueSource)


@optional("taking the statistics of batch norms into engines", _TRANSLATOR)
def owner_of_buffer(placeholder: torch.fx.Node) -> object | None:
    """The module that Dynamo read a buffer's placeholder from; ``None`` for any other input.

    For its guards, Dynamo keeps the source of each input: an expression over the locals and globals
    of the traced frame. This function evaluates the part of it that stands for the module.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    source = getattr(placeholder, "_dynamo_source", None)
    module, is_buffer, _ = str(getattr(source, "name", "")).rpartition("._buffers[")
    if not is_buffer:
        return None
    try:
        root = InstructionTranslator.current_tx().output.root_tx
        return cast(object, eval(module, {"L": root.f_locals, "G": root.f_globals}))
    except (AttributeError, KeyError, NameError):  # no trace, or the module is in a closure
        return None


_TRACE = "torch._logging._internal:"


@optional(
    "the record in torch's structured trace",
    *(f"{_TRACE}{each}" for each in ("LazyTraceHandler", "trace_log")),
    without=lambda: False,
)
def structured_trace_is_on() -> bool:
    """True if torch writes its structured trace (``TORCH_TRACE=folder``), which ``tlparse`` reads.

    Torch writes the trace by a logging handler of its own. If that handler has no folder, the trace
    is off: the handler removes itself at the first event.
    """
    from torch._logging._internal import LazyTraceHandler, trace_log

    handlers = trace_log.handlers
    return any(isinstance(each, LazyTraceHandler) and each.root_dir for each in handlers)


@optional(
    "the record in torch's structured trace",
    *("torch._guards:CompileId.from_string", f"{_TRACE}trace_structured_artifact"),
)
def trace_artifact(name: str, encoding: str, payload: str, graph_id: str) -> None:
    """Write a file into torch's structured trace; ``tlparse`` shows it with that compile.

    Args:
        name: The name that ``tlparse`` shows.
        encoding: ``"json"`` or ``"string"``.
        payload: The file's text.
        graph_id: Dynamo's compile id, for calls outside of a compile. Other text is ignored.
    """
    from torch._guards import CompileId
    from torch._logging._internal import trace_structured_artifact

    try:
        known = CompileId.from_string(graph_id)
    except ValueError:
        known = None
    trace_structured_artifact(name, encoding, lambda: payload, compile_id=known)
