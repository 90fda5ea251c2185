"""What Dynamo compiles now: its registry, the compile's id, the frame, its inputs."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.fx
from torch._dynamo import list_backends as _list_backends
from torch._dynamo import lookup_backend as lookup_backend
from torch._dynamo import register_backend as register_backend
from torch._dynamo.exc import InvalidBackend as InvalidBackend
from torch._dynamo.exc import RestartAnalysis, SkipFrame

from composer._torch.names import optional

DYNAMO_CONTROL_FLOW: tuple[type[Exception], ...] = (RestartAnalysis, SkipFrame)
"""Exceptions with which Dynamo's own control flow passes through a backend: no engine's fault."""


def list_backends() -> list[str]:
    """Every name that :func:`lookup_backend` knows, the debugging ones included."""
    return _list_backends(exclude_tags=())


@optional(
    "composer run --override",
    "torch._dynamo.config:debug_backend_override",
    without=lambda rule: False,
)
def override_backend(rule: str) -> bool:
    """Set which backend compiles which graph, whatever backend the program names.

    Args:
        rule: As the environment variable ``TORCH_COMPILE_OVERRIDE_BACKENDS`` has it, which is read
            only when torch is imported.

    Returns:
        Whether this torch has such a setting.
    """
    torch._dynamo.config.debug_backend_override = rule
    return True


@optional(
    "a backend that the program registered by a name of composer's",
    "torch._dynamo.backends.registry:_COMPILER_FNS",
)
def registered_backend(name: str) -> Callable[..., Any] | None:
    """What the name stands for; ``None`` without any, or for an entry point not loaded yet."""
    from torch._dynamo.backends.registry import _COMPILER_FNS

    return _COMPILER_FNS.get(name)


_COMPILE_ID = "torch._guards:CompileContext.current_compile_id"


@optional("Dynamo's id of each compile in the record", _COMPILE_ID)
def compile_id() -> str | None:
    """Dynamo's compile id (``"0/0"``), ``None`` outside of a compile."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return None if current is None else str(current)


@optional("waiting longer for other ranks at a recompile", _COMPILE_ID, without=lambda: False)
def is_recompile() -> bool:
    """Whether Dynamo compiles code that it has compiled before, for other inputs or objects."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return current is not None and bool(current.frame_compile_id)


@optional(
    "the count of graphs that a call captured anew",
    "torch._dynamo.utils:counters",
    without=lambda: 0,
)
def captured_graphs() -> int:
    """How many graphs Dynamo gave to any backend since this process started."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


_TRANSLATOR = "torch._dynamo.symbolic_convert:InstructionTranslator.current_tx"
FRAMES = (
    _TRANSLATOR,
    "torch._dynamo.aot_compile:aot_compile_fullgraph.__code__",
    "torch._dynamo.external_utils:__file__",
    "torch._dynamo.resume_execution:ContinueExecutionCache.generated_code_metadata",
)


@optional("the name of the class that is compiled", *FRAMES)
def traced_frame() -> tuple[types.CodeType, dict[str, Any], str] | None:
    """The frame that Dynamo is tracing: its original code, its locals, its module's name.

    After a graph break Dynamo traces a generated function that goes on in the middle of the
    user's; its metadata lead back to the user's code, whose frame waits on the Python stack.
    ``torch.compile(torch.nn.Linear(...))`` traces a frame of torch's own around ``fn``: the frame
    given is then that of the ``forward`` within; around a function in C, which has no frame, it has
    that one's name. What ``aot_compile`` was asked for has been traced when a backend is called.
    ``None`` outside of a compile.
    """
    from torch._dynamo import aot_compile
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        root = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # nothing is being traced on this thread
        saving = aot_compile.aot_compile_fullgraph.__code__
        return _frame_to_be(locals_on_the_stack(saving).get("model"))
    return users(root)


def users(frame: Any) -> tuple[types.CodeType, dict[str, Any], str]:
    """The user's frame that a frame which Dynamo converts stands for."""
    from torch._dynamo import external_utils
    from torch._dynamo.resume_execution import ContinueExecutionCache

    if frame.f_code.co_filename == external_utils.__file__:
        called: Any = frame.f_locals.get("fn")
        wrapped = _frame_to_be(called)
        if wrapped is not None:
            return wrapped
        if hasattr(called, "__name__"):
            named = frame.f_code.replace(co_qualname=called.__name__)
            return named, {}, called.__module__ or "torch"
    resumed = ContinueExecutionCache.generated_code_metadata.get(frame.f_code)
    code = frame.f_code if resumed is None else resumed.code
    scope = dict(frame.f_locals) if resumed is None else locals_on_the_stack(code)
    return code, scope, str(frame.f_globals.get("__name__", ""))


@optional(
    "the name of what the program compiled, behind a graph break in a part of it",
    "torch._dynamo.eval_frame:_TorchDynamoContext.__call__",
    "torch._dynamo.external_utils:__file__",
)
def called_frame() -> tuple[types.CodeType, dict[str, Any], str] | None:
    """As :func:`traced_frame`, for what the program gave ``torch.compile`` and calls now.

    They differ behind a graph break in a submodule: Dynamo traces its ``forward`` by itself then.
    """
    from torch._dynamo import external_utils

    called: Any = locals_on_the_stack(_call_of_compiled()).get("fn")
    around = getattr(called, "__code__", None)
    if around is not None and around.co_filename == external_utils.__file__:
        called = called.__wrapped__
    return _frame_to_be(called)


def _frame_to_be(called: Any) -> tuple[types.CodeType, dict[str, Any], str] | None:
    """What :func:`traced_frame` says of a call of this; ``None`` where it has no code in Python."""
    method: Any = called.forward if isinstance(called, torch.nn.Module) else called
    method = method.func if isinstance(method, functools.partial) else method
    if callable(method) and not hasattr(method, "__code__"):  # an object of a class with __call__
        method = method.__call__
    function = getattr(method, "__func__", method)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return None
    owner = getattr(method, "__self__", None)
    if isinstance(owner, torch.nn.Module) and code in _around_forward():
        return _frame_to_be(owner)
    return code, dict.fromkeys(code.co_varnames[:1], owner), function.__module__


@functools.cache
def _around_forward() -> tuple[types.CodeType, ...]:
    """The code by which a module calls its ``forward``; Dynamo leaves it alone."""
    module = torch.nn.Module
    return module._call_impl.__code__, module._wrapped_call_impl.__code__


@functools.cache
def _call_of_compiled() -> types.CodeType:
    """The code of what ``torch.compile`` returns."""
    from torch._dynamo import eval_frame

    within = eval_frame._TorchDynamoContext.__call__.__code__.co_consts
    codes = (each for each in within if isinstance(each, types.CodeType))
    return next(each for each in codes if each.co_name == "compile_wrapper")


def locals_on_the_stack(code: types.CodeType) -> dict[str, Any]:
    """Locals of the nearest running frame of ``code``; Dynamo's rewritten copy counts as it."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        running = frame.f_code
        if (running.co_filename, running.co_firstlineno, running.co_name) == (
            code.co_filename,
            code.co_firstlineno,
            code.co_name,
        ):
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def is_static_input(node: torch.fx.Node) -> bool:
    """Whether Dynamo marked the placeholder as a weight: fixed in place between calls."""
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def is_marked_by_program(node: torch.fx.Node) -> bool:
    """Whether the mark is the program's own, ``torch._dynamo.mark_static_address``, as on caches.

    Dynamo itself marks parameters, and tensors that it reads from a module.
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
    """Whether the input is a number that the program draws by Python's ``random`` at each call."""
    from torch._dynamo.source import RandomValueSource

    return isinstance(getattr(placeholder, "_dynamo_source", None), RandomValueSource)


@optional("taking the statistics of batch norms into engines", _TRANSLATOR)
def owner_of_buffer(placeholder: torch.fx.Node) -> object | None:
    """The module that Dynamo read a buffer's placeholder from; ``None`` for any other input.

    Dynamo's source is an expression over the traced frame's locals and globals, made for guards.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    module, is_buffer, _ = str(name() if callable(name) else name).rpartition("._buffers[")
    if not is_buffer:
        return None
    try:
        root = InstructionTranslator.current_tx().output.root_tx
        return cast(object, eval(module, {"L": root.f_locals, "G": root.f_globals}))
    except (AttributeError, KeyError, NameError):  # not being traced, or read through a cell
        return None


_TRACE = "torch._logging._internal:"


@optional(
    "the record in torch's structured trace",
    *(f"{_TRACE}{each}" for each in ("LazyTraceHandler", "trace_log")),
    without=lambda: False,
)
def structured_trace_is_on() -> bool:
    """Whether torch writes what ``tlparse`` reads (``TORCH_TRACE=folder``).

    Torch writes it by a handler of its own. One without a folder stands for off: it takes itself
    away at the first event.
    """
    from torch._logging._internal import LazyTraceHandler, trace_log

    own = (each for each in trace_log.handlers if isinstance(each, LazyTraceHandler))
    return any(handler.root_dir for handler in own)


@optional(
    "the record in torch's structured trace",
    *("torch._guards:CompileId.from_string", f"{_TRACE}trace_structured_artifact"),
)
def trace_artifact(name: str, encoding: str, payload: str, graph_id: str) -> None:
    """Write a file into torch's structured trace; ``tlparse`` shows it with that compile.

    Args:
        name: What ``tlparse`` calls it.
        encoding: ``"json"`` or ``"string"``.
        payload: The file's text.
        graph_id: Dynamo's compile id, for when none is under way; ignored if it is no such id.
    """
    from torch._guards import CompileId
    from torch._logging._internal import trace_structured_artifact

    try:
        known = CompileId.from_string(graph_id)
    except ValueError:
        known = None
    trace_structured_artifact(name, encoding, lambda: payload, compile_id=known)
