"""The only file that names torch's private modules.

Each import, or the function here that uses it, says why no public name serves.
``tests/test_torch.py`` has a test for each, so that after a torch upgrade a test fails with the
name of what moved. Heavy parts (the ONNX exporter) are imported when first used.

The sections, in order:

- what Dynamo compiles now: the compile's id, the frame, where its inputs come from
- what the user compiled, and where Dynamo could not follow
- other ranks
- modes, and what autograd saves: grad mode, autocast, hooks
- operators and their schemas: names, paths, who writes, who draws
- random numbers
- sizes that are symbols
- tensors and their memory
- fake tensors
- copies of a graph, and what Dynamo says of its inputs
- graphs in files
- compiles outside of Dynamo's own: after it, beside it, within another
- passes: canonical ATen, Inductor's pattern matcher
- AOTAutograd: its settings, its step, what it found out
- compiled backwards, and the guard around them
- Inductor: its settings and caches
- the ONNX exporter
- the processor
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import operator
import os
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.fx

# Unwraps the tensors of torch.func's transforms, which have no storage of their own.
from torch._C import _functorch

# Dynamo: the registry of backends, the frame that is being traced, and the compile under way.
# Only ``torch.compile`` itself is public, and ``torch._dynamo`` as far as it is documented.
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import aot_compile as dynamo_aot_compile
from torch._dynamo import compiled_autograd, convert_frame, eval_frame, external_utils
from torch._dynamo.aot_compile_types import SerializableCallable as SerializableCallable
from torch._dynamo.backends.registry import _COMPILER_FNS
from torch._dynamo.backends.registry import list_backends as _list_backends
from torch._dynamo.backends.registry import lookup_backend as lookup_backend
from torch._dynamo.backends.registry import register_backend as register_backend
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.convert_frame import compile_lock as compile_lock
from torch._dynamo.eval_frame import DisableContext, OptimizedModule, innermost_backend
from torch._dynamo.exc import InvalidBackend as InvalidBackend
from torch._dynamo.exc import RestartAnalysis, SkipFrame, Unsupported, UserError
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.source import GlobalStateSource, RandomValueSource
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.utils import counters
from torch._guards import CompileContext, TracingContext, tracing

# The kinds of custom pass that Inductor documents; the module is private with all of Inductor.
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._ops import HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd import forward_ad
from torch.fx.traceback import preserve_node_meta

# Tells whether memory is still there, and does not keep it: a storage takes no weakref.
from torch.multiprocessing.reductions import StorageWeakRef

# The base of all batch norms, which torch documents but does not export.
from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm

# The one way to see what runs below autograd; its module's name begins with an underscore.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError

from composer import forks

if TYPE_CHECKING:
    import onnx_ir

T = TypeVar("T")

DYNAMO_CONTROL_FLOW: tuple[type[Exception], ...] = (RestartAnalysis, SkipFrame)
"""Exceptions with which Dynamo's own control flow passes through a backend: no engine's fault."""

StopRecomputation = _StopRecomputationError
"""How a checkpoint ends its second forward: raised within whatever saves the last tensor."""

CUSTOM_PASSES = (CustomGraphPass, CustomGraphModulePass, CustomPartitionerFn)
"""Inductor's kinds of pass; they have one base class from torch 2.13 on."""

if TYPE_CHECKING or hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"):
    from torch._inductor.custom_graph_pass import (
        CustomInferenceAwareGraphPass as CustomInferenceAwareGraphPass,
    )
else:

    class CustomInferenceAwareGraphPass(CustomGraphPass):
        """Stands in for a class that torch 2.11 lacks: there, no pass is told of inference."""


GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def list_backends() -> list[str]:
    """Every name that :func:`lookup_backend` knows, the debugging ones included."""
    return _list_backends(exclude_tags=())


def registered_backend(name: str) -> Callable[..., Any] | None:
    """What the name stands for; ``None`` without any, or for an entry point not loaded yet."""
    return _COMPILER_FNS.get(name)


# --- what Dynamo compiles now ---------------------------------------------------------------------


def compile_id() -> str | None:
    """Dynamo's compile id (``"0/0"``), ``None`` outside of a compile."""
    current = CompileContext.current_compile_id()
    return None if current is None else str(current)


def is_recompile() -> bool:
    """Whether Dynamo compiles code that it has compiled before, for other inputs or objects."""
    current = CompileContext.current_compile_id()
    return current is not None and bool(current.frame_compile_id)


def captured_graphs() -> int:
    """How many graphs Dynamo gave to any backend since this process started."""
    return counters["stats"]["unique_graphs"]


def traced_frame() -> tuple[types.CodeType, dict[str, Any], str] | None:
    """The frame that Dynamo is tracing: its original code, its locals, its module's name.

    After a graph break Dynamo traces a generated function that goes on in the middle of the
    user's; its metadata lead back to the user's code, whose frame waits on the Python stack.
    ``torch.compile(torch.nn.Linear(...))`` traces a frame of torch's own around ``fn``: the frame
    given is then that of the ``forward`` within; around a function in C, which has no frame, it has
    that one's name. What ``aot_compile`` was asked for has been traced when a backend is called.
    ``None`` outside of a compile.
    """
    try:
        root = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # nothing is being traced on this thread
        saving = dynamo_aot_compile.aot_compile_fullgraph.__code__
        return _frame_to_be(_locals_on_the_stack(saving).get("model"))
    if root.f_code.co_filename == external_utils.__file__:
        called: Any = root.f_locals.get("fn")
        wrapped = _frame_to_be(called)
        if wrapped is not None:
            return wrapped
        if hasattr(called, "__name__"):
            named = root.f_code.replace(co_qualname=called.__name__)
            return named, {}, called.__module__ or "torch"
    resumed = ContinueExecutionCache.generated_code_metadata.get(root.f_code)
    code = root.f_code if resumed is None else resumed.code
    scope = dict(root.f_locals) if resumed is None else _locals_on_the_stack(code)
    return code, scope, str(root.f_globals.get("__name__", ""))


def called_frame() -> tuple[types.CodeType, dict[str, Any], str] | None:
    """As :func:`traced_frame`, for what the program gave ``torch.compile`` and calls now.

    They differ behind a graph break in a submodule: Dynamo traces its ``forward`` by itself then.
    """
    called: Any = _locals_on_the_stack(_call_of_compiled()).get("fn")
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
    return code, dict.fromkeys(code.co_varnames[:1], owner), function.__module__


@functools.cache
def _call_of_compiled() -> types.CodeType:
    """The code of what ``torch.compile`` returns."""
    within = eval_frame._TorchDynamoContext.__call__.__code__.co_consts
    codes = (each for each in within if isinstance(each, types.CodeType))
    return next(each for each in codes if each.co_name == "compile_wrapper")


def _locals_on_the_stack(code: types.CodeType) -> dict[str, Any]:
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


def is_random_number(placeholder: torch.fx.Node) -> bool:
    """Whether the input is a number that the program draws by Python's ``random`` at each call."""
    return isinstance(getattr(placeholder, "_dynamo_source", None), RandomValueSource)


def owner_of_buffer(placeholder: torch.fx.Node) -> object | None:
    """The module that Dynamo read a buffer's placeholder from; ``None`` for any other input.

    Dynamo's source is an expression over the traced frame's locals and globals, made for guards.
    """
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


def structured_trace_is_on() -> bool:
    """Whether torch writes what ``tlparse`` reads (``TORCH_TRACE=folder``).

    Torch writes it by a handler of its own. One without a folder stands for off: it takes itself
    away at the first event.
    """
    from torch._logging._internal import LazyTraceHandler, trace_log

    own = (each for each in trace_log.handlers if isinstance(each, LazyTraceHandler))
    return any(handler.root_dir for handler in own)


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


# --- what the user compiled, and where Dynamo could not follow ------------------------------------


def undisabled(compiled: T) -> T:
    """The callable within ``torch.compiler.disable``'s wrapper, or ``compiled`` itself.

    The wrapper of ``torch.compile`` keeps its original in the same attribute, but is no wrapper
    to take off: the mark tells them apart, and the context where a module was wrapped.
    """
    if isinstance(compiled, OptimizedModule) and isinstance(compiled.dynamo_ctx, DisableContext):
        return cast(T, compiled._orig_mod)
    if not getattr(compiled, "_torchdynamo_disable", False):
        return compiled
    return cast(T, getattr(compiled, "_torchdynamo_orig_callable", compiled))


def disabled(
    function: Callable[..., Any], reason: str = "engines are not traced"
) -> Callable[..., Any]:
    """``torch.compiler.disable``, typed: Dynamo does not trace the function."""
    wrap = cast(Callable[..., Callable[..., Any]], torch.compiler.disable)
    return wrap(function, reason=reason)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What ``torch.compile`` was given for a callable; torch has no public way to ask."""

    original: Callable[..., Any]
    backend: Callable[..., Any]
    name: str
    mode: str | None
    options: dict[str, Any] | None
    dynamic: bool | None
    fullgraph: bool


def compiled_as(function: Callable[..., Any]) -> Compiled | None:
    """How a callable was compiled; ``None`` for one that was not.

    That is a compiled function, an ``OptimizedModule``, or a module after ``module.compile()``.
    The context of the compile is a module's attribute, and the closure of a function's wrapper.
    """
    if isinstance(function, OptimizedModule):
        context: Any = function.dynamo_ctx
        original = function._orig_mod
    else:
        in_place = getattr(function, "_compiled_call_impl", None)
        function = function if in_place is None else in_place
        if not hasattr(function, "_torchdynamo_wrapper_id"):
            return None
        context = inspect.getclosurevars(function).nonlocals["self"]
        original = cast(Any, function)._torchdynamo_orig_callable
    if not context.callback:  # torch.compiler.disable
        return None
    wrapper: Any = innermost_backend(context.callback)
    given = getattr(wrapper, "kwargs", {})
    return Compiled(
        original=original,
        backend=getattr(wrapper, "compiler_fn", wrapper),
        name=str(getattr(wrapper, "compiler_name", getattr(wrapper, "__name__", wrapper))),
        mode=given.get("mode"),
        options=given.get("options"),
        dynamic=getattr(wrapper, "dynamic", None),
        fullgraph=context.fullgraph,
    )


def forget_given_up() -> None:
    """Have Dynamo try again the functions that it gave up on, for whatever backend that was.

    Only code without cache entries is reset; other code keeps its entries.
    """
    count = getattr(eval_frame, "_get_total_cache_entry_count", None)  # torch >= 2.13
    count = count or (lambda code: len(eval_frame._debug_get_cache_entry_list(code)))
    with convert_frame.compile_lock:
        for seen in tuple(convert_frame.input_codes.seen):
            code = seen()
            if code is not None and not count(code):
                reset_code(code)


OnBreak = Callable[[str, Sequence[traceback.FrameSummary], bool], None]
"""Called at a graph break with torch's message, the traced frames, the innermost last, and whether
the whole function was given up. Before that, it may have been called for the same place without."""

_listeners: list[OnBreak] = []
_listening = forks.lock()
_log_graph_break = InstructionTranslatorBase.log_graph_break
_convert_frame = ConvertFrameAssert.__call__


@contextlib.contextmanager
def graph_breaks_to(listener: OnBreak) -> Iterator[None]:
    """Tell ``listener`` of every graph break, in the thread that compiles.

    A graph carries the reason for its end (``compile_subgraph_reason``), but no graph does for a
    break that no operation precedes, or for a function that Dynamo gives up. It logs the former;
    the latter leave the conversion of the frame as exceptions.
    """
    with _listening:
        _listeners.append(listener)
        InstructionTranslatorBase.log_graph_break = _telling_log  # type: ignore[method-assign,assignment]
        ConvertFrameAssert.__call__ = _telling_convert  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        with _listening:
            _listeners.remove(listener)
            if not _listeners:
                InstructionTranslatorBase.log_graph_break = _log_graph_break  # type: ignore[method-assign]
                ConvertFrameAssert.__call__ = _convert_frame  # type: ignore[method-assign]


def _telling_log(translator: Any, code_options: Any, reason: str, exc: Any) -> None:
    _tell(exc, getattr(exc, "real_stack", ()), frame_skipped=False)
    _log_graph_break(translator, code_options, reason=reason, exc=exc)


def _telling_convert(convert: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return _convert_frame(convert, frame, *args, **kwargs)
    except (Unsupported, UserError) as error:
        code = frame.f_code
        whole = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
        _tell(error, error.real_stack or [whole], frame_skipped=True)
        raise


def _tell(error: Any, stack: Sequence[traceback.FrameSummary], *, frame_skipped: bool) -> None:
    message = str(getattr(error, "msg", error))
    for listener in tuple(_listeners):
        listener(message, stack, frame_skipped)


# --- other ranks ----------------------------------------------------------------------------------


def world_size() -> int:
    """How many ranks the default group of ``torch.distributed`` has; 1 without one."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


@dataclass(frozen=True, slots=True)
class GroupMember:
    """This process in the default group of ``torch.distributed``.

    Attributes:
        rank: Its rank.
        world: How many ranks there are.
        store: The key-value store by which the ranks found each other.
    """

    rank: int
    world: int
    store: Any

    def store_below(self, prefix: str) -> Any:
        """The store with a prefix before every key, so that no one else's keys are met."""
        from torch.distributed.distributed_c10d import PrefixStore

        return PrefixStore(prefix, self.store)


def group_member() -> GroupMember | None:
    """This process in the default group; ``None`` where it is alone.

    The key-value store is there already, whatever the ranks were started by (there is none under
    MPI), and no public function gives it.
    """
    world = world_size()
    if world == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return GroupMember(torch.distributed.get_rank(), world, _get_default_store())


# --- modes, and what autograd saves ---------------------------------------------------------------


def autocasts() -> list[tuple[str, torch.dtype]]:
    """The devices for which autocast is on, each with its dtype."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]


_FLOAT32_SETTINGS = (
    ("generic", "all"),
    *(("cuda", each) for each in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", each) for each in ("all", "matmul", "conv", "rnn")),
)
"""Those of ``torch.backends``, each behind the one that it follows while it is not set itself. By
their private names: what ``torch.backends.mkldnn.fp32_precision`` sets is that of all (2.13)."""


def float32_precision() -> tuple[str, ...]:
    """In what torch computes float32: the word for matrix products, then each newer setting.

    The word is empty where the newer settings are none that it stands for: torch then raises.
    """
    try:
        word = torch.get_float32_matmul_precision()
    except RuntimeError:
        word = ""
    return word, *(torch._C._get_fp32_precision_getter(*each) for each in _FLOAT32_SETTINGS)


def set_float32_precision(given: Sequence[str]) -> None:
    """Have torch compute float32 in what :func:`float32_precision` has given."""
    word, *settings = given
    torch.set_float32_matmul_precision(word or "highest")  # as it is before it is set
    for names, setting in zip(_FLOAT32_SETTINGS, settings, strict=True):
        torch._C._set_fp32_precision_setter(*names, setting)


def enters_autocast(target: Any) -> bool:
    """Whether a graph's node opens a region of autocast."""
    return target is _enter_autocast


def autocast_dtype(node: torch.fx.Node) -> torch.dtype | None:
    """The dtype of the region of autocast that a graph's node opens; ``None`` for other nodes."""
    if node.target is not _enter_autocast:
        return None
    device, dtype, enabled, *_ = node.args
    if not enabled:
        return None
    return cast("torch.dtype | None", dtype) or torch.get_autocast_dtype(str(device))


def changes_autocast(target: Any) -> bool:
    """Whether a graph's node opens or closes a region of autocast."""
    return target is _enter_autocast or target is _exit_autocast


_CHANGES_STATE = (
    torch._C._set_grad_enabled,
    _enter_autocast,
    _exit_autocast,
)


def changes_state(target: Any) -> bool:
    """Whether a graph's node changes grad mode or autocast for the nodes behind it."""
    return any(target is each for each in _CHANGES_STATE)


_FUNCTORCH = ("torch._functorch", "torch._C._functorch", "torch.autograd", "torch._C._autograd")


def _is_functorchs(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith(_FUNCTORCH)


def sets_modes(target: Any) -> bool:
    """Whether a graph's node may set what :func:`modes_put_back` puts back."""
    return changes_state(target) or _is_functorchs(target)


def _leave_inference_modes(error: BaseException) -> None:
    """Leave those that a graph entered and did not leave: they are locals of its code."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    entered = [v for f in frames for v in f.f_locals.values() if isinstance(v, _INFERENCE_MODE)]
    for each in reversed(entered):
        each.__exit__(None, None, None)


_INFERENCE_MODE: Any = torch._C._InferenceMode


class _Autocast:
    """How deep autocast is nested, and what it computes in; whether it is on, keys say."""

    def __init__(self) -> None:
        kinds = {"cpu", *([each.type] if (each := torch.accelerator.current_accelerator()) else [])}
        self._depth = self._nesting()
        self._caches = torch.is_autocast_cache_enabled()
        self._dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}

    @staticmethod
    def _nesting() -> int:
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        return depth

    def put_back(self) -> None:
        """Leave what was entered since; the copies of weights that it made go with the last."""
        for _ in range(self._nesting() - self._depth):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._caches)
        for kind, dtype in self._dtypes.items():
            torch.set_autocast_dtype(kind, dtype)


@contextlib.contextmanager
def modes_put_back() -> Iterator[None]:
    """Put back the modes that a graph had set when it raised.

    A captured graph sets grad mode, autocast and the levels of ``torch.func`` by calls like any
    other, with no ``finally`` for what lies between. So does ``torch.compile`` (2.13) for the
    program, but for grad mode and the saving of tensors, once its call is over.
    """
    asked: Any = torch._C._autograd
    refusal = asked._saved_tensors_hooks_get_disabled_error_message()
    depth = _functorch.get_dynamic_layer_stack_depth()
    within_dual_level = is_forward_mode()
    grad, forward = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    inference, autocast = torch.is_inference_mode_enabled(), _Autocast()
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*keys):
        try:
            yield
        except BaseException as error:
            if torch.is_inference_mode_enabled() != inference:
                _leave_inference_modes(error)
            autocast.put_back()
            while _functorch.get_dynamic_layer_stack_depth() > depth:
                _functorch.pop_dynamic_layer_stack()  # torch 2.11 pops too many down to a depth
            if not within_dual_level:
                with contextlib.suppress(RuntimeError):  # where the graph has entered none
                    torch._C._exit_dual_level(level=0)
            torch._C._set_grad_enabled(grad)
            torch._C._set_fwd_grad_enabled(forward)
            if refusal is None:
                asked._saved_tensors_hooks_enable()
            else:
                asked._saved_tensors_hooks_disable(refusal)
            raise


def is_forward_mode() -> bool:
    """Whether a level of ``torch.autograd.forward_ad`` is open: tensors may carry tangents."""
    return forward_ad._current_level >= 0


def compile_anew_in_forward_mode() -> None:
    """Have Dynamo compile the graph at hand again where :func:`is_forward_mode` changes.

    Dynamo (2.13) guards on it only where a function opens a level itself. Outside of Dynamo
    nothing is done.
    """
    context = TracingContext.try_get()
    if context is not None:
        guard = GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL)
        context.guards_context.dynamo_guards.add(guard)


def is_watched() -> bool:
    """Whether a mode is active that may change what is called (``torch.set_default_device``)."""
    from torch import overrides
    from torch.utils import _python_dispatch as dispatch

    modes: Any = overrides._get_current_function_mode_stack
    return bool(modes() or dispatch._get_current_dispatch_mode_stack())


def saving_as_it_is() -> contextlib.AbstractContextManager[Any]:
    """Hide what autograd saves from the hooks of a checkpoint, which counts saved tensors.

    They are detached, since a result that its own operation saves would keep itself alive for good
    otherwise: torch's documentation of the hooks warns of that. torch has no public way to ask
    whether hooks are set, or may be. Where none are, none are set: ``torch.func`` refuses to
    differentiate then.
    """
    asked: Any = torch._C._autograd  # torch's stub leaves these out
    allowed = asked._saved_tensors_hooks_is_enabled()
    if not allowed or asked._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


@contextlib.contextmanager
def own_backward(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Run a backward of composer's own: no hook of these tensors is called, and torch traces none.

    There is no public way to remove all hooks of a tensor and put them back, nor to leave the
    tracing of backwards (``compiled_autograd``) out where the program has switched it on.
    """
    kept = [(each, each._backward_hooks) for each in tensors if each._backward_hooks]
    for tensor, _ in kept:
        tensor._backward_hooks = None
    traced = compiled_autograd.compiled_autograd_enabled
    try:
        with compiled_autograd._disable() if traced else contextlib.nullcontext():
            yield
    finally:
        for tensor, hooks in kept:
            tensor._backward_hooks = hooks


# --- operators and their schemas ------------------------------------------------------------------


def takes_functions(target: Any) -> bool:
    """Whether this is an operator over functions, graphs or a user's Triton kernel."""
    return isinstance(target, HigherOrderOperator)


def operator_namespace(target: Any) -> str:
    """``"aten"`` for an operator of that namespace, overload or not; empty for what is none."""
    if isinstance(target, OpOverload):
        return target.namespace
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0]
    return ""


def operator_name(target: Any) -> str:
    """``"aten::add"`` for every overload of it; empty for what is no operator."""
    return target._schema.name if isinstance(target, OpOverload) else ""


def has_effect(target: Any) -> bool:
    """Whether an operator is there for what it does: it gives nothing, or is called in order.

    AOTAutograd has ``with_effects`` around operators that print or raise, such as
    ``aten._linalg_check_errors``; it gives a token without elements that the next one is given.
    """
    if isinstance(target, OpOverload):
        return not target._schema.returns
    return target is torch.ops.higher_order.with_effects


def is_view(target: Any) -> bool:
    """Whether the operator's result shares its input's memory, by its schema."""
    return isinstance(target, OpOverload) and target.is_view


def draws(target: object) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd


def _is_composed(operator: OpOverload) -> bool:
    """Whether torch's kernel of it calls other operators and computes nothing itself."""
    return _has_kernel(operator, _COMPOSED)


def draws_itself(target: object) -> bool:
    """Whether it does so in a kernel of its own, not by operators that it is composed of."""
    return draws(target) and not _is_composed(cast(OpOverload, target))


def _has_kernel(operator: OpOverload, key: Any) -> bool:
    """Whether C++ has one; torch's own question counts decompositions in Python as well."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(registry_name(operator), key)


def argument(node: torch.fx.Node, name: str) -> Any:
    """The value that a call of an operator has for the argument ``name`` of its schema, or None."""
    for position, each in enumerate(cast(Any, node.target)._schema.arguments):
        if each.name == name:
            given = dict(enumerate(node.args))
            return node.kwargs.get(name, given.get(position, each.default_value))
    return None


def wants_data(error: BaseException) -> bool:
    """Whether tracing came to a number that only the data have."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def shares_memory(operator: OpOverload) -> bool:
    """Whether a result may share an argument's memory, or be that argument, by the schema."""
    return any(each.alias_info is not None for each in operator._schema.returns)


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a call of an operator writes to in place, by the operator's schema."""
    arguments = cast(Any, node.target)._schema.arguments
    given = [argument(node, a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    flat = [each for value in given for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, torch.fx.Node)]


def may_write_by_schema(node: torch.fx.Node) -> bool:
    """Whether an operator, or any overload of one whose overload is open, writes to an operand."""
    target = node.target
    if isinstance(target, OpOverload):
        return bool(written_by(node))
    if not isinstance(target, OpOverloadPacket):
        return False
    overloads = cast(list[str], cast(Any, target).overloads())
    schemas = (getattr(target, name)._schema for name in overloads)
    aliases = (a for schema in schemas for a in schema.arguments if a.alias_info)
    writes = (a for a in aliases if a.alias_info.is_write)
    return any(a.name in node.kwargs or not a.is_out for a in writes)


def operator_path(target: object) -> tuple[str, ...] | None:
    """Where under ``torch.ops`` an operator is found; ``None`` for what is none.

    Operators cannot be pickled, and torch's own way around it (``torch.fx._graph_pickler``) sends
    their graphs' metadata along, which cannot always be sent. A Triton kernel of the user's is
    named by a number that means something in this process only, and compiled autograd calls what
    it made for the backward under way.

    Raises:
        TypeError: the operator runs such a kernel, or is one of compiled autograd's.
    """
    if isinstance(target, compiled_autograd.Op):
        raise TypeError(f"compiled autograd made {target} in this process")
    if isinstance(target, OpOverload):
        return (*target._schema.name.split("::"), target._overloadname)
    if isinstance(target, OpOverloadPacket):
        return tuple(target._qualified_op_name.split("::"))
    if isinstance(target, HigherOrderOperator):
        if "triton_kernel" in target.__name__:
            raise TypeError("it runs a Triton kernel that only this process knows")
        return ("higher_order", target.__name__)
    return None


def operator_at(*path: str) -> object:
    """The operator that :func:`operator_path` names.

    Raises:
        AttributeError: no module that was imported here registers it.
    """
    return functools.reduce(getattr, path, cast(object, torch.ops))


def decomposition_of(operator: OpOverload) -> Callable[..., Any]:
    """Torch's own decomposition of the operator."""
    from torch._decomp import decomposition_table

    return decomposition_table[operator]


@functools.cache
def loops_over_lists() -> Mapping[OpOverload, Callable[..., Any]]:
    """Each functional operator over lists of tensors, and torch's own loop over the lists for it.

    The loop calls the plain operator once for each place. It is what eager runs on a CPU, and no
    public name leads to it.
    """
    names = torch._C._dispatch_get_all_op_names()
    found = (_overload(name) for name in names if name.startswith("aten::_foreach_"))
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return {
        each: functools.partial(each._op_dk, key)
        for each in found
        if not each._schema.is_mutable and _has_kernel(each, key)
    }


def _overload(name: str) -> OpOverload:
    """The operator of a name like ``"aten::add.Tensor"``."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return cast(OpOverload, getattr(getattr(torch.ops.aten, packet), overload or "default"))


def multiply_add() -> OpOverload:
    """What Dynamo makes of ``addcmul_``, ``addcdiv_`` and ``add_`` with a factor, as in optimizers.

    An operator that is made for Inductor; eager computes it as a product and a sum.
    """
    from torch._inductor.inductor_prims import fma

    return cast(OpOverload, fma)


_HOMES = ("torch", "_operator", "math", "builtins")
_FOLDER = str(Path(torch.__file__).parent)


def path_in_torch(function: Any) -> str | None:
    """``"torch.nn.functional.linear"``, for a function of torch's own or Python's own.

    ``None`` for any other, and for one that somebody put in the place of torch's.
    """
    name = str(getattr(function, "__name__", ""))
    home = getattr(function, "__module__", None)
    if isinstance(function, types.BuiltinFunctionType):
        home = home or type(function.__self__).__module__
        return f"{home}.{name}" if home.split(".")[0] in _HOMES else None
    if not isinstance(function, types.FunctionType):
        return None
    is_there = getattr(sys.modules.get(str(home)), name, None) is function
    return f"{home}.{name}" if is_there and _is_written_in_torch(function) else None


def is_method_of_torch(name: str) -> bool:
    """Whether a tensor's method is torch's own; not where somebody put another in its place."""
    found = getattr(torch.Tensor, name, None)
    if isinstance(found, types.FunctionType):
        return _is_written_in_torch(found)
    return isinstance(found, types.MethodDescriptorType | types.WrapperDescriptorType)


def _is_written_in_torch(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_FOLDER + os.sep)


# --- random numbers -------------------------------------------------------------------------------


@contextlib.contextmanager
def generators_as_they_are() -> Iterator[None]:
    """Show this thread a frozen random state, and ignore its attempts to set it.

    AOTAutograd, Inductor and ``fork_rng`` restore the state that the generators had when they
    began. From a background thread that would make the program draw the same numbers once more.
    Other threads are not affected. To be used by one thread at a time, the one that compiles.
    """
    homes = [(torch, torch.random), *([(torch.cuda,)] if torch.cuda.is_available() else [])]
    with contextlib.ExitStack() as undo:
        for modules in homes:
            read, write = _unmoved(modules[-1].get_rng_state, modules[-1].set_rng_state)
            for module in modules:
                undo.enter_context(_patched(module, "get_rng_state", read))
                undo.enter_context(_patched(module, "set_rng_state", write))
        yield


def _unmoved(
    read: Callable[..., torch.Tensor], write: Callable[..., None]
) -> tuple[Callable[..., torch.Tensor], Callable[..., None]]:
    """Versions of both for this thread: each device's state stays what it was when first read."""
    here = threading.get_ident()
    seen: dict[str, torch.Tensor] = {}

    def get_rng_state(*device: Any, **named: Any) -> torch.Tensor:
        state = read(*device, **named)
        if threading.get_ident() != here:
            return state
        return seen.setdefault(f"{device} {named}", state).clone()

    def set_rng_state(*state: Any, **named: Any) -> None:
        if threading.get_ident() != here:
            write(*state, **named)

    return get_rng_state, set_rng_state


def draws_random_numbers(run: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether a graph draws random numbers for such inputs, found by running it on fake ones.

    Most functions that may draw do not: dropout when not training, attention without dropout.

    Raises:
        Exception: whatever the graph raises on fake inputs, if its control flow needs the data.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    seen = _Seen()
    with mode, seen:
        run(*(as_fake(mode, value) for value in inputs))
    return seen.draws


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Watches the operators that are called below autograd for one that draws.

    Attention has the tag of those even without dropout, so ``dropout_p`` decides. In inference mode
    the operators that others are composed of arrive here whole: their parts decide.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.draws = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "prim" and _is_composed(func):  # prim is unknown to the dispatcher
            with self:  # not func.decompose: torch's GRU in Python (2.13) forgets its dropout
                return func._op_dk(_COMPOSED, *args, **(kwargs or {}))
        if draws(func):
            known = func._schema.arguments
            given = {each.name: each.default_value for each in known}
            given |= zip((each.name for each in known), args, strict=False)
            self.draws |= (given | (kwargs or {})).get("dropout_p") != 0.0
        return func(*args, **(kwargs or {}))

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo leaves alone, in any thread, what is called while another kind of mode is on."""
        return True


# --- sizes that are symbols -----------------------------------------------------------------------


_recaptured_numbers: ContextVar[Mapping[Any, Any]] = ContextVar("numbers", default={})  # noqa: B039
"""The values of the symbols in the call for which a graph is compiled again."""


def hint(size: Any) -> Any:
    """The value a symbolic number has in the call that is compiled for; adds no guard.

    That is the first call, or the one for which a graph is compiled again. Anything else is given
    back as it is.
    """
    if not isinstance(size, torch.SymInt | torch.SymFloat):
        return size
    expression, numbers = size.node.expr, _recaptured_numbers.get()
    if not numbers or not expression.free_symbols <= numbers.keys():
        return size.node.hint
    number = expression.subs(numbers)
    return int(number) if isinstance(size, torch.SymInt) else float(number)


def symbols(size: Any) -> frozenset[str]:
    """Names of the symbols in a size; none for a number. Asking adds no guard."""
    if not isinstance(size, torch.SymInt):
        return frozenset()
    return frozenset(map(str, size.node.expr.free_symbols))


def size_with(size: Any, values: Mapping[str, int]) -> int:
    """What a size is where its symbols have these values."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    given = {each: values[str(each)] for each in size.node.expr.free_symbols}
    return int(size.node.expr.subs(given))


def symbol_facts(size: torch.SymInt) -> dict[str, tuple[int | None, int | None, int | None]]:
    """For each symbol in a size: its value in the first call, and its bounds.

    The value is ``None`` for a size that only the data tells, a bound where there is none.
    """
    env = size.node.shape_env
    hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    facts: dict[str, tuple[int | None, int | None, int | None]] = {}
    for symbol in size.node.expr.free_symbols:
        known = env.var_to_range.get(symbol)
        low, top = map(_finite, (known.lower, known.upper)) if known else (0, None)
        value = hints.get(symbol)
        facts[str(symbol)] = (None if value is None else int(value), low, top)
    return facts


def is_same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all that the graph's guards say; asking adds none."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return isinstance(a, int) and isinstance(b, int) and a == b


def depends_on_data(size: Any) -> bool:
    """Whether a size is known only once the graph runs; a question about it cannot be guarded."""
    if not isinstance(size, torch.SymInt):
        return False
    return any(value is None for value, _, _ in symbol_facts(size).values())


def least(size: Any) -> int | None:
    """The least that a size can be, by the bounds of its symbols; ``None`` where there is none."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return _finite(size.node.shape_env.bound_sympy(size.node.expr).lower)


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer else None


def guards_on(values: Iterable[Any]) -> int:
    """How many guards stand on the sizes that these symbolic numbers, or tensors, have."""
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return len(size.node.shape_env.guards)
    return 0


def with_symbols(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a call as Dynamo passes them to a backend: symbols stand for numbers."""
    fakes = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    pairs = zip(fakes, inputs, strict=True)
    return [fake if isinstance(fake, torch.SymInt) else value for fake, value in pairs]


# --- tensors and their memory ---------------------------------------------------------------------


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
"""Types that hold dense memory and nothing else."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor; of what ``torch.func`` wraps, that of what is within."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


@contextlib.contextmanager
def no_idle_workers(inputs: Sequence[Any]) -> Iterator[None]:
    """Have Inductor start no processes for compiling where it has no kernels for them.

    They are for Triton's; C++ is compiled by threads of this process (2.13). Its Dynamo backend
    starts them for any graph, ``torch.compile(backend="inductor")`` by itself only for one on a
    GPU. Their start takes a core for some seconds: engines were measured beside it, and a slow one
    was chosen.
    """
    on_cpu = all(each.device.type == "cpu" for each in inputs if isinstance(each, torch.Tensor))
    if not on_cpu:
        yield
        return
    from torch._inductor import async_compile

    with compile_lock:
        starts = async_compile.maybe_warm_pool
        async_compile.maybe_warm_pool = lambda: None
        try:
            yield
        finally:
            async_compile.maybe_warm_pool = starts


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory; works for fake tensors, which have no address."""
    return int(storage_of(tensor)._cdata)


def any_batched(values: Iterable[object]) -> bool:
    """Whether a tensor stands for several, as in a backward for many gradients at once.

    Within ``torch.func.vmap`` torch itself refuses to call a compiled backward.
    """
    tensors = (each for each in values if isinstance(each, torch.Tensor))
    return any(map(_functorch.is_legacy_batchedtensor, tensors))


def suggested_memory_format(x: torch.Tensor) -> torch.memory_format:
    """The order in which torch's kernels lay out what they make of a tensor of four dimensions."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(cast(Any, x))


def memory_gone(tensor: torch.Tensor) -> Callable[[], bool]:
    """What tells whether the memory that a tensor has now was freed; does not keep it."""
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return cast(Callable[[], bool], reference.expired)


def copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The same bytes elsewhere, on the same device."""
    return cast(torch.UntypedStorage, cast(Any, storage).clone())


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """What allocates a contiguous tensor; on the CPU by the call that Inductor's own code makes.

    It takes a third of ``torch.empty``'s time, which parses its arguments anew every time.
    """
    if device.type != "cpu":
        return lambda: torch.empty(shape, dtype=dtype, device=device)
    from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]  # no stub

    strides = torch.empty(shape, device="meta").stride()
    return functools.partial(_empty_strided_cpu, shape, strides, dtype)


def order_of_memory(x: torch.Tensor) -> list[int]:
    """Dimensions of a new tensor like this one, in the order in which they lie in memory."""
    from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

    return compute_elementwise_output_logical_to_physical_perm(x)[0]


def flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of nested tuples, lists and dicts, and the way back."""
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten(value)
    return leaves, lambda new: _pytree.tree_unflatten(new, spec)


def before_swaps(told: Callable[[torch.Tensor], None]) -> None:
    """Tell of every tensor that ``torch.utils.swap_tensors`` is about to swap.

    It has no hook (torch 2.13), and refuses tensors that have weak references. It is reached by
    what it asks, since a program may hold the function itself
    (``from torch.utils import swap_tensors``).
    """

    def getweakrefs(tensor: torch.Tensor) -> list[Any]:
        told(tensor)
        return weakref.getweakrefs(tensor)

    asked = types.SimpleNamespace(**vars(weakref) | {"getweakrefs": getweakrefs})
    cast(Any, torch.utils).weakref = asked


def receives_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step gets parameters from other ranks, by collectives that raise no version."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return isinstance(optimizer, getattr(module, "ZeroRedundancyOptimizer", ()))


# --- fake tensors ---------------------------------------------------------------------------------


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """The mode that the fake tensors among ``values`` belong to; a new one if there are none."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(mode: FakeTensorMode, value: Any) -> Any:
    """A real tensor's fake in ``mode``, with its own sizes; everything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    return mode.from_tensor(value, static_shapes=True)


@contextlib.contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Run operations on fake tensors; a size that only data decide may get a new symbol."""
    # As Dynamo does: kernels that call operators with symbols for sizes fail without it.
    from torch._dispatch.python import enable_python_dispatcher

    shape_env = mode.shape_env
    fresh = shape_env.ignore_fresh_unbacked_symbols() if shape_env else contextlib.nullcontext()
    with fresh, mode, enable_python_dispatcher():
        yield


def is_users_fake(value: object) -> bool:
    """Whether the program itself made this tensor fake, so that calls will have no data either.

    The fakes that torch compiles with, such as the inputs of the graphs that DDP cuts, are of the
    compile's own mode.
    """
    context = TracingContext.try_get()
    own = None if context is None else context.fake_mode
    return isinstance(value, FakeTensor) and own is not None and value.fake_mode is not own


def fake_of_fixed_size(value: torch.Tensor) -> FakeTensor | None:
    """The fake that AOTAutograd is to meet for a tensor Dynamo has not seen; ``None`` outside.

    Where sizes are dynamic by default it would give such a tensor symbols that nobody knows. The
    fake has to be kept until then.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return None
    return context.fake_mode.from_tensor(value, static_shapes=True)


def share_fake(original: torch.Tensor, copy: torch.Tensor) -> None:
    """Let AOTAutograd see the original's fake tensor when it meets the copy.

    It fakes inputs by identity: without this a copy gets symbols of its own, and views lose the
    base they share. Outside of a compile there is nothing to share.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return
    fake = _fake_in(context, original)
    context.fake_mode.fake_tensor_converter.set_tensor_memo(copy, fake)
    cast(Any, copy)._composer_fake = fake  # the memo holds it weakly; it lives as long as the copy


def _fake_in(context: TracingContext, value: torch.Tensor) -> FakeTensor:
    """The fake of a tensor in a compile's own mode, which is kept there as long as it lives."""
    if isinstance(value, FakeTensor):
        return value
    mode = context.fake_mode
    assert mode is not None
    symbolic = cast(Any, context.tensor_to_context).get(value)
    return mode.from_tensor(
        value,
        symbolic_context=symbolic,
        source=None if symbolic is None else symbolic.tensor_source,
        trace=False,
    )


def fakes_of(inputs: Sequence[torch.Tensor], dynamic: Iterable[int]) -> list[FakeTensor]:
    """Fakes of tensors in a new mode, as Dynamo makes them.

    Args:
        inputs: The tensors.
        dynamic: Positions of those whose first size gets a symbol.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    mode, symbolic = FakeTensorMode(shape_env=ShapeEnv()), frozenset(dynamic)

    def fake(i: int, value: torch.Tensor) -> FakeTensor:
        if i not in symbolic:
            return mode.from_tensor(value, static_shapes=True)
        kinds = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (value.dim() - 1)]
        context: Any = StatelessSymbolicContext(kinds)
        return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(f"x{i}"))

    return [fake(i, value) for i, value in enumerate(inputs)]


def fakes_met(inputs: Sequence[Any]) -> list[Any]:
    """What AOTAutograd meets for inputs in the compile under way: fakes, with their symbols.

    To be asked before it runs, and kept for :func:`recompiling`.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        mode = FakeTensorMode()
        return [as_fake(mode, value) for value in inputs]
    return [
        _fake_in(context, value) if isinstance(value, torch.Tensor) else value for value in inputs
    ]


def forget_met(mode: FakeTensorMode) -> None:
    """Let go of the tensors that a mode has met, to which it keeps weak references.

    ``torch.utils.swap_tensors`` refuses tensors that have some; Dynamo clears those of its own
    modes after a compile. What is faked from then on is faked anew.
    """
    met = mode.fake_tensor_converter.meta_converter.describer
    met.lookup_tensor.clear()
    met.lookup_storage.clear()


# --- copies of a graph, and what Dynamo says of its inputs ----------------------------------------


def carry_source_metadata(source: torch.fx.GraphModule, copy: torch.fx.GraphModule) -> None:
    """Re-attach what copying a graph drops, so that AOTAutograd still sees static inputs.

    Dynamo keeps it in attributes because ``meta`` is pickled (pytorch/pytorch#141640); when it
    moves into ``meta`` this function can go.
    """
    carry_attributes(source, copy)
    for node, twin in zip(source.graph.nodes, copy.graph.nodes, strict=True):
        carry_node_source(node, twin)


def carry_attributes(source: torch.fx.GraphModule, copy: torch.fx.GraphModule) -> None:
    """Re-attach what Dynamo hung on the graph module itself."""
    for name, value in vars(source).items():
        if name not in vars(copy):
            object.__setattr__(copy, name, value)


def carry_node_source(node: torch.fx.Node, twin: torch.fx.Node) -> None:
    """Re-attach where Dynamo says that a placeholder comes from."""
    if hasattr(node, "_dynamo_source"):
        twin._dynamo_source = node._dynamo_source


def carry_no_source(node: torch.fx.Node, added: torch.fx.Node) -> None:
    """Mark a placeholder as added to ``node``'s graph, so that it has no source of Dynamo's.

    AOTAutograd refuses a graph of Dynamo's in which a placeholder lacks the attribute. It accepts
    the value ``None``, which is meant for placeholders that are added when a graph is split.
    """
    if hasattr(node, "_dynamo_source"):
        cast(Any, added)._dynamo_source = None


def let_go_of_examples(copy: torch.fx.GraphModule) -> None:
    """Take off the placeholders what Dynamo takes off those of its own graph after a compile.

    That are the real inputs: weak references to tensors, which ``torch.utils.swap_tensors`` then
    refuses to swap, and some that are not weak.
    """
    for node in copy.graph.find_nodes(op="placeholder"):
        node.meta.pop("grapharg", None)


def name_sources(gm: torch.fx.GraphModule) -> None:
    """Give a source, the graph itself, to buffers and parameters that Dynamo has not seen.

    AOTAutograd refuses a graph of Dynamo's in which one has no source. Tracing adds such buffers
    (for ``torch.tensor([1.0])``), and so may passes.
    """
    from torch._dynamo.source import ConstantSource

    known = getattr(gm, "_param_name_to_source", None)
    if known is None:
        return
    names = (name for each in (gm.named_parameters(), gm.named_buffers()) for name, _ in each)
    added = {name: ConstantSource(name) for name in names if name not in known}
    object.__setattr__(gm, "_param_name_to_source", {**known, **added})


def lazy_graph_module(root: Any, graph: torch.fx.Graph, name: str) -> torch.fx.GraphModule:
    """A graph module that generates its code when it is first called, as Dynamo's do.

    ``recompile`` then costs a graph that is only edited nothing.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, name)


def settled_forward(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """``gm.forward``, generated now: a lazy graph module would look it up anew at every call."""
    if hasattr(gm, "real_recompile"):
        cast(Any, gm).real_recompile()
    return gm.forward


def lasting_metadata(node: torch.fx.Node) -> dict[str, Any]:
    """Of a node's metadata what means the same in another process: its line, and Dynamo's mark."""
    kept = {"stack_trace": node.meta["stack_trace"]} if node.meta.get("stack_trace") else {}
    mark = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return kept | ({"tensor_dict": {"_dynamo_static_input_type": mark}} if mark else {})


# --- graphs in files ------------------------------------------------------------------------------


def will_be_saved() -> bool:
    """Whether torch is about to save what is being compiled to a file (``aot_compile``).

    Dynamo's own ``eager`` backend asks the same.
    """
    from torch._functorch import config as functorch_config

    return bool(getattr(functorch_config, "force_autograd_cache", False))


def not_saving() -> contextlib.AbstractContextManager[None]:
    """Compile as if nothing were saved to a file.

    While it saves, AOTAutograd accepts what Inductor makes and refuses that of any other compiler.
    """
    from torch._functorch import config as functorch_config

    settings = (
        "force_autograd_cache",
        "strict_autograd_cache",
        "bundled_autograd_cache",
        "bypass_autograd_cache_key",
    )
    off = {name: False for name in settings if hasattr(functorch_config, name)}
    return cast(contextlib.AbstractContextManager[None], functorch_config.patch(off))


def graph_as_bytes(gm: torch.fx.GraphModule) -> bytes:
    """A graph with its symbols, for another process; the tensors that it holds as well."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(gm, Options(ops_filter=None))


def graph_of_bytes(data: bytes) -> torch.fx.GraphModule:
    """The graph that was written, ready to be compiled by :func:`recaptured`."""
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    gm = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(gm, torch.fx.GraphModule)
    _give_numbers_their_symbols(gm)
    _pass_for_captured(gm)
    gm.recompile()
    return gm


def _pass_for_captured(gm: torch.fx.GraphModule) -> None:
    """Have AOTAutograd look for Dynamo's mark of weights, which it does in graphs of Dynamo's only.

    Weights cost nothing to keep for the backward. Where it knows of none, it cuts the graph in two
    elsewhere than it did when the graph was captured, and no model that was kept is the backward's.
    """
    gm.meta.setdefault("dynamo_compile_id", None)
    for node in gm.graph.find_nodes(op="placeholder"):
        cast(Any, node)._dynamo_source = None
    object.__setattr__(gm, "_param_name_to_source", {})
    name_sources(gm)


def _give_numbers_their_symbols(gm: torch.fx.GraphModule) -> None:
    """Have the fakes of inputs that stand for dynamic numbers know their symbols, as Dynamo's do.

    Files leave that out, and AOTAutograd takes a symbol that no ``item`` has for one that an engine
    needs as a constant: it asks Dynamo to start again.
    """
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        fake, number = (each.meta.get("example_value") for each in (node.args[0], node))
        if isinstance(fake, FakeTensor) and isinstance(number, torch.SymFloat):
            fake.item_memo = number


# --- compiles outside of Dynamo's own -------------------------------------------------------------


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put something in the place of what ``owner``, a module or a class, has by this name.

    By one thread at a time: what two put there in turn is not taken away in turn.
    """
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile as Dynamo does: one compile at a time in the process, which says that it compiles.

    FX has one flag for all threads that says it traces. Two compiles at once leave it set for good,
    and every compiled function refuses to run from then on; while one compiles, those of other
    threads run only if ``torch.compiler.is_compiling()``.
    """
    with compile_lock:
        # torch.compiler tells of its flag, and has no public way to set it.
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def is_in_bad_fork() -> bool:
    """Whether this process is forked from one that used a device, which it cannot use then.

    No public name says so before the device is asked for, and that raises.
    """
    devices = (torch.cuda, torch.xpu, torch.mtia)
    return any(each._is_in_bad_fork() for each in devices)


@forks.in_child
def _forget_other_threads_compile() -> None:
    """Free the compile lock that a thread of the parent's held, and take its flags down.

    That thread does not exist in the child, so nobody else would.
    """
    if forks.freed(compile_lock):
        torch.compiler._is_compiling_flag = False
        tracing = torch.fx._symbolic_trace
        if hasattr(tracing, "_is_fx_tracing_flag"):  # from torch 2.14 on each thread has its own
            tracing._is_fx_tracing_flag = False


@contextlib.contextmanager
def captured_with(fakes: Sequence[Any], inputs: Sequence[Any]) -> Iterator[None]:
    """Compile within a compile: AOTAutograd, run again, meets ``fakes`` where it sees ``inputs``.

    It writes what it finds out to the context of the compile; the inner one is given its own.
    """
    mode = fake_mode_of(fakes)
    for fake, value in zip(fakes, inputs, strict=True):
        if isinstance(fake, FakeTensor):
            mode.fake_tensor_converter.set_tensor_memo(value, fake)
    with tracing(TracingContext(mode)):
        yield


@contextlib.contextmanager
def recaptured(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Compile a captured graph again, after Dynamo's compile is over, with its own symbols."""
    fakes = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    captured = any(isinstance(fake, FakeTensor) for fake in fakes)
    pairs = zip(fakes, inputs, strict=True)
    numbers = {f.node.expr: value for f, value in pairs if isinstance(f, torch.SymInt)}
    with compiling():  # until the end: another thread may capture the same graph again
        known = _recaptured_numbers.set(numbers)
        try:
            with captured_with(fakes, inputs) if captured else contextlib.nullcontext():
                yield
        finally:
            _recaptured_numbers.reset(known)
            if captured:
                forget_met(fake_mode_of(fakes))


@contextlib.contextmanager
def recompiling(fakes: Sequence[Any]) -> Iterator[None]:
    """Compile for these fakes, after the compile that met them is over."""
    with compiling(), tracing(TracingContext(fake_mode_of(fakes))):
        yield


@contextlib.contextmanager
def as_if_captured(inputs: Sequence[Any]) -> Iterator[None]:
    """Compile as within Dynamo's compile, of inputs with fixed sizes.

    Without its fake mode Inductor fails on a graph that holds graphs (``torch.cond``).
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with captured_with([as_fake(mode, value) for value in inputs], inputs):
        yield


# --- passes ---------------------------------------------------------------------------------------


def is_pattern_matcher_pass(value: object) -> bool:
    """Whether it is one of Inductor's; its heavy module is not imported to find out."""
    module = sys.modules.get("torch._inductor.pattern_matcher")
    return module is not None and isinstance(value, module.PatternMatcherPass)


def is_canonical(target: Any) -> bool:
    """Whether :func:`capture_aten` keeps what a call of this function means."""
    if isinstance(target, HigherOrderOperator):
        return target is torch.ops.higher_order.cond
    return not _is_functorchs(target)


def _is_static(symbolic: Any) -> bool:
    """Whether Dynamo gave none of a tensor's sizes and strides a symbol."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    kinds = (*symbolic.dynamic_sizes, *symbolic.dynamic_strides)
    return all(kind in (DimDynamic.STATIC, DimDynamic.INFER_STRIDE) for kind in kinds)


def capture_aten(run: Callable[..., Any], example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Canonical ATen of a captured graph, before autograd, with the sizes' own symbols.

    ``make_fx(pre_dispatch=True)`` records one overload a call above autograd and autocast, as
    ``torch.export`` does for training. Inputs are faked anew, in a mode that shares Dynamo's
    symbols but not its fake tensors: running the graph may change what a fake tensor says.

    Args:
        run: Runs the captured graph.
        example_inputs: Real tensors and symbols, in the order of the placeholders.
    """
    from torch.fx import traceback
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx

    context = TracingContext.try_get()
    known = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    mode = FakeTensorMode(shape_env=known, allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        symbolic = None if context is None else cast(Any, context.tensor_to_context).get(value)
        if symbolic is None or (value.dim() and _is_static(symbolic)):  # half the work
            return mode.from_tensor(value, static_shapes=True)
        return mode.from_tensor(
            value, symbolic_context=symbolic, source=symbolic.tensor_source, trace=False
        )

    fakes = [fake(value) for value in example_inputs]
    with mode, traceback.preserve_node_meta(), _use_lazy_graph_module(True):
        made = make_fx(run, pre_dispatch=True)(*fakes)
    forget_met(mode)
    return made


def traces_nested_graph() -> bool:
    """Whether what is traced now is a graph within another, such as a branch of ``torch.cond``.

    A decomposition is not told where the call stands that it is to replace.
    """
    from torch.fx.experimental import proxy_tensor

    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
    return tracer is not None and tracer.is_hop_subgraph_tracer()


# --- AOTAutograd ----------------------------------------------------------------------------------


def backward_lowering_at_once() -> contextlib.AbstractContextManager[None]:
    """Compile the backward with the forward, so that its failure is the attempt's.

    AOTAutograd leaves it for the first ``.backward()`` otherwise, past every fallback.
    """
    import torch._functorch.config as functorch_config

    return cast(
        contextlib.AbstractContextManager[None],
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    )


def keeping_no_weights_for_free() -> contextlib.AbstractContextManager[None]:
    """Have what the backward needs be kept at the same cost, whether it is a weight or not.

    The partitioner keeps a buffer, which costs nothing, and computes anew from it what the forward
    wrote to it: from the buffer as it is then, so gradients are wrong (torch 2.13).
    """
    import torch._functorch.config as functorch_config

    return cast(
        contextlib.AbstractContextManager[None],
        functorch_config.patch(treat_parameters_as_free_to_save=False),
    )


@contextlib.contextmanager
def without_donated_buffers() -> Iterator[None]:
    """Keep AOTAutograd from donating what the forward saved to the backward, to be overwritten.

    Only Inductor makes use of such memory. As long as no engine writes to it, another engine can
    answer for one that failed.
    """
    import torch._functorch.config as functorch_config

    with functorch_config.patch(donated_buffer=False):
        yield


def donate_nothing() -> None:
    """Let ``backward(retain_graph=True)`` work; to be called while a backward is compiled.

    AOTAutograd forbids it where a backward may write to what the forward saved ("donated" buffers,
    meant for Inductor). Its own switch is read at run time as well (torch 2.13), and is not ours.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def boxed(function: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    """``function`` with its arguments in one list, as AOTAutograd calls what it compiled."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]  # no py.typed

    return cast(Callable[[Sequence[Any]], Any], make_boxed_func(function))


def takes_a_list(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes its arguments in one list, which it may empty."""
    cast(Any, function)._boxed_call = True
    return function


def aot_compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: GraphCompiler,
    backward: GraphCompiler,
    inference: GraphCompiler,
    partition: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]],
    decompositions: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile through AOTAutograd, which makes graphs functional and replays mutations.

    A graph that needs a backward is cut in two by ``partition``; the halves go to ``forward`` and
    ``backward``, in this order and both before this returns. Any other goes to ``inference``.
    """
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=decompositions,
    )
    with backward_lowering_at_once():
        return backend(gm, list(example_inputs))


def min_cut(
    gm: torch.fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cut a joint graph where the least memory has to be kept in between, as for Inductor."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with _draws_kept_apart(gm), _draws_saved(gm):
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    _describe_second_draws(backward)
    return forward, backward


@contextlib.contextmanager
def _draws_saved(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Have the partitioner keep what is drawn, whatever memory it is to save.

    Where it may compute more anew in the backward (``aggressive_recomputation``,
    ``activation_memory_budget``), it has other numbers drawn there (torch 2.13, ``aot_eager`` too).
    With no budget at all it keeps the inputs alone, with next to none also what has to be kept, and
    a call that gives several tensors where they should be.
    """
    from torch._functorch import partitioners
    from torch.utils.checkpoint import CheckpointPolicy

    drawn = [node for node in gm.graph.nodes if draws(node.target)]
    for node in drawn:
        for each in {node, *_tensors_drawn(node)}:
            each.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # but in a checkpoint
    choose = partitioners.choose_saved_values_set

    def with_some_budget(
        joint_graph: Any, node_info: Any, memory_budget: float = 1
    ) -> list[torch.fx.Node]:
        found = choose(joint_graph, node_info, memory_budget or sys.float_info.min)
        return list(dict.fromkeys(each for node in found for each in _tensors_drawn(node)))

    with _patched(partitioners, "choose_saved_values_set", with_some_budget if drawn else choose):
        yield


def _tensors_drawn(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What stands for the tensors that a call draws, or gives."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return parts if parts and draws(node.target) else [node]


@contextlib.contextmanager
def _draws_kept_apart(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Have the partitioner leave calls alone that are alike, where they draw.

    It knows some operators by name and makes one of two calls of any other: two
    ``torch.zeros(3).uniform_()`` get the same numbers (torch 2.13, ``aot_eager`` too).
    """
    from torch._functorch import compile_utils

    drawn = {each.target.overloadpacket for each in gm.graph.nodes if draws(each.target)}
    with _patched(compile_utils, "rand_ops", [*compile_utils.rand_ops, *drawn]):
        yield


def _describe_second_draws(backward: torch.fx.GraphModule) -> None:
    """Say what is drawn once more for a checkpoint; the partitioner does not (torch 2.13)."""
    from torch._prims.rng_prims import run_with_rng_state

    for node in backward.graph.find_nodes(op="call_function", target=run_with_rng_state):
        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        (state, draw, *operands), kwargs = given
        with fake_mode_of([state]):
            node.meta.setdefault("val", draw(*operands, **kwargs))


def mutated_inputs() -> frozenset[int]:
    """Positions of the inputs that the graph AOTAutograd has just traced writes to."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return frozenset()
    known = enumerate(context.fw_metadata.input_info)
    return frozenset(i for i, each in known if each.mutates_data or each.mutates_metadata)


def copied_back() -> dict[int, int]:
    """Positions of outputs that AOTAutograd's run-time wrapper copies to inputs after each call.

    Of the graph that it has just traced, to the positions of those inputs. Inputs of which more
    than the numbers changes are left out.
    """
    context = TracingContext.try_get()
    known = context.fw_metadata if context else None
    if known is None:
        return {}
    written = enumerate(known.mutated_inp_runtime_indices)
    info = known.input_info
    return {at: i for at, i in written if info[i].mutates_data and not info[i].mutates_metadata}


def aot_adds_nothing(outputs: int) -> bool:
    """Whether AOTAutograd's run-time wrapper has nothing to do for the graph it has just traced.

    That is so where no input is written to, no output is a view of one, and the graph has as many
    ``outputs`` as the captured one. ``False`` where AOTAutograd does not say.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    if known is None or mutated_inputs():
        return False
    plain = all(each.output_type is OutputType.non_alias for each in known.output_info)
    extras = known.num_intermediate_bases, len(known.tokens), known.is_rng_op_functionalized
    return plain and not any(extras) and len(known.output_info) == outputs


def tracing_state() -> str:
    """Text of the global settings that decide what AOTAutograd makes of a graph.

    They are those in the key of AOTAutograd's own cache (torch 2.13), the kernels of attention that
    are allowed, and all that float32 is computed in.
    """
    import torch._functorch.config

    attention: Any = torch.backends.cuda
    facts = (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        *autocasts(),
        *(torch.are_deterministic_algorithms_enabled(), float32_precision()),
        *(attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled()),
        *(attention.math_sdp_enabled(), attention.cudnn_sdp_enabled()),
        *(torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled),
        sorted(torch._functorch.config.save_config_portable().items()),
    )
    return " ".join(map(str, facts))


# --- compiled backwards ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BuiltBackward:
    """A backward as an engine compiled it; it takes its arguments in one list.

    ``graph`` gives the functional graph that it was compiled from, ``None`` where that was not
    kept; it is as AOTAutograd made it, or, where it is ``exact``, as :func:`compiled_from` was
    told. ``donated`` are the positions of arguments that the forward saved and the backward may
    write to.
    """

    compiled: Callable[[list[Any]], Any]
    graph: Callable[[], torch.fx.GraphModule | None]
    exact: bool
    donated: tuple[int, ...]


GuardBackward = Callable[[BuiltBackward], Callable[[list[Any]], Any]]
_guard_backward: ContextVar[GuardBackward | None] = ContextVar("composer_backward", default=None)
_guarding = forks.lock()
_guards: list[GuardBackward] = []


@contextlib.contextmanager
def backwards_by(guard: GuardBackward) -> Iterator[None]:
    """Give autograd what ``guard`` makes of each backward that is compiled within, on this thread.

    AOTAutograd has one place where a compiled backward, new or from its cache, meets autograd. A
    backend's own ``bw_compiler`` does not see those from the cache, and only composer's own
    lowering has one to wrap.
    """
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    with _guarding:
        if not _guards:
            original = AOTDispatchAutograd.post_compile
            AOTDispatchAutograd.post_compile = staticmethod(  # type: ignore[method-assign]
                functools.wraps(original)(functools.partial(_with_guard, original))
            )
        _guards.append(guard)
    token = _guard_backward.set(guard)
    try:
        yield
    finally:
        _guard_backward.reset(token)
        with _guarding:
            _guards.remove(guard)
            if not _guards:
                ours = AOTDispatchAutograd.post_compile
                AOTDispatchAutograd.post_compile = staticmethod(ours.__wrapped__)  # type: ignore[method-assign,attr-defined]


def _with_guard(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``post_compile`` with the backward replaced.

    AOTAutograd refuses ``retain_graph=True`` where memory is donated. It is told that none is: the
    guard sees to it. Its cache keeps the metadata themselves, so they are left as they are.
    """
    guard = _guard_backward.get()
    if guard is None:
        return original(*args, **kwargs)
    given, call_with = _at_autograd(original, args, kwargs)
    compiled = given["compiled_bw_func"]
    if compiled is None:
        return original(*args, **kwargs)
    metadata, kept = copy.copy(given["fw_metadata"]), given["lazy_backward_info"]
    donated, metadata.bw_donated_idxs = tuple(metadata.bw_donated_idxs or ()), []
    own = getattr(compiled, "_composer_graph", None)
    built = BuiltBackward(
        compiled if getattr(compiled, "_boxed_call", False) else boxed(compiled),
        functools.partial(_kept_backward, kept) if own is None else lambda: own,
        own is not None,
        donated,
    )
    return call_with(compiled_bw_func=guard(built), fw_metadata=metadata)


def _at_autograd(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Mapping[str, Any], Callable[..., Any]]:
    """What ``post_compile`` is given, by name, and a call of it with some of that replaced.

    They are the fields of its first argument, or (torch < 2.13) arguments of its own.
    """
    spec = args[0] if args else None
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = vars(spec)
        return fields, lambda **new: original(dataclasses.replace(spec, **new), *args[1:], **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)

    def call(**new: Any) -> Any:
        bound.arguments.update(new)
        return original(*bound.args, **bound.kwargs)

    return bound.arguments, call


def keeps_graph() -> bool:
    """Whether the backward that runs on this thread may be followed by another of its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _kept_backward(kept: Any) -> torch.fx.GraphModule | None:
    """The graph of a backward, which AOTAutograd keeps for compiled autograd.

    One from the cache is read when it is asked for.
    """
    graph = getattr(kept, "bw_module", None)
    if graph is None and hasattr(kept, "bw_module_fn"):
        graph = kept.bw_module_fn()
    return cast(torch.fx.GraphModule | None, graph)


def compiled_from(graph: torch.fx.GraphModule, compiled: T) -> T:
    """Say which graph a backward was compiled from, for :func:`backwards_by`."""
    cast(Any, compiled)._composer_graph = graph
    return compiled


# --- Inductor -------------------------------------------------------------------------------------


def inductor_options() -> list[str]:
    """Every setting that Inductor knows; ``torch.compile(options=...)`` takes them."""
    import torch._inductor

    return torch._inductor.list_options()


def modes() -> list[str]:
    """The words that ``torch.compile(mode=...)`` takes."""
    import torch._inductor

    return list(torch._inductor.list_mode_options())


def inductor_config(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that ``torch.compile(mode=..., options=...)`` would hand to Inductor.

    Raises:
        RuntimeError: Inductor does not know the mode, an option or the type of its value.
    """
    wrapper = torch._TorchCompileInductorWrapper(mode, options, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return dict(wrapper.config)


def inductor_setting(name: str, config: Mapping[str, Any]) -> Any:
    """A setting as Inductor would see it: the compile's own, else the one of its config."""
    import torch._inductor.config as inductor_config

    return config[name] if name in config else getattr(inductor_config, name)


def is_compilers(error: BaseException) -> bool:
    """Whether Inductor raised it since the system's compiler failed, or there is none."""
    raised = sys.modules.get("torch._inductor.exc")  # else there was nothing to raise it
    kinds = (raised.CppCompileError, raised.InvalidCxxCompiler) if raised else ()
    return isinstance(error, kinds)


def inductor_cache_dir() -> str:
    """Where Inductor keeps what it compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


@contextlib.contextmanager
def fresh_compiles() -> Iterator[None]:
    """Compile anew: neither Inductor nor AOTAutograd takes a graph from its cache.

    ``torch.compiler.config.force_disable_caches`` does that, too, and warns.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        yield


@contextlib.contextmanager
def constants_let_go() -> Iterator[None]:
    """Let the code that Inductor loads within be freed when nothing refers to it any more.

    Otherwise Inductor keeps the modules of all code that it has loaded for as long as the process
    lives, and in them the constants of frozen graphs (torch 2.13).
    """
    from torch._inductor.codecache import PyCodeCache

    known = set(map(id, PyCodeCache.modules))
    try:
        yield
    finally:
        known |= set(map(id, PyCodeCache.modules_no_attr.values()))
        for module in [each for each in PyCodeCache.modules if id(each) not in known]:
            PyCodeCache.modules.remove(module)
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


@contextlib.contextmanager
def constants_kept_apart() -> Iterator[None]:
    """Have what Inductor freezes within give out copies of its constants.

    Otherwise an output of weights alone is one tensor for all calls (torch 2.13), and whoever gets
    it may write to it.
    """
    from torch._inductor import freezing

    freeze = freezing.freeze

    def freeze_and_copy(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, list[int]]:
        gm, kept = freeze(*args, **kwargs)
        _copy_what_is_given_out(gm)
        return gm, kept

    with _patched(freezing, "freeze", freeze_and_copy):
        yield


def _copy_what_is_given_out(gm: torch.fx.GraphModule) -> None:
    (returned,) = gm.graph.find_nodes(op="output")
    for node in returned.all_input_nodes:
        base = node
        while isinstance(base.target, OpOverload) and shares_memory(base.target):
            base = base.args[0]
        if base.op == "get_attr":  # a clone of it would be taken for one that does nothing
            with gm.graph.inserting_before(returned):
                copy = gm.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (node,))
            copy.meta.update(node.meta)
            returned.replace_input_with(node, copy)


# --- the ONNX exporter ----------------------------------------------------------------------------


class OnnxTranslator:
    """The exporter's translation of functional ATen graphs, without its capture and retracing.

    ``torch.onnx.export`` accepts only programs from ``torch.export``, refuses symbolic integers
    as inputs and runs every decomposition again, which is most of its time. Its last step does
    all we need: one pass over the nodes with torchlib's registry. Making one takes about a second,
    most of it imports.
    """

    def __init__(self) -> None:
        from torch.onnx._internal.exporter import _core, _decomp, _fx_passes, _registration
        from torch.onnx._internal.fx.passes import type_promotion

        self._lock = forks.lock()
        self._core, self._passes = _core, _fx_passes
        self._promotions = type_promotion.TypePromotionTable()
        self._interpreter = type_promotion._TypePromotionInterpreter
        with _quiet(_registration.logger):  # it warns where torchvision is not installed
            self._registry = _registration.ONNXRegistry.from_torchlib()
        known = _decomp.get_onnx_implemented_overloads(self._registry)
        self.known: frozenset[str] = frozenset(map(registry_name, known))
        """What the exporter itself translates, by :func:`registry_name`."""

    def register(self, translations: Mapping[Any, Callable[..., Any]]) -> None:
        """Have these functions translate their operators, in place of the exporter's own."""
        for target, function in translations.items():
            self._registry.register_op(target, function)

    @property
    def translated(self) -> frozenset[str]:
        """What it translates by now, by :func:`registry_name`."""
        targets = (each for each, found in self._registry.functions.items() if found)
        return frozenset(each if isinstance(each, str) else registry_name(each) for each in targets)

    def prepare(self, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Make type promotion explicit and drop assertions, as the exporter does. In place."""
        mixed = {node: rule for node in gm.graph.nodes if (rule := self._rule_of(node))}
        if mixed:
            self._promote(gm, mixed)
        return self._passes.remove_assertion_nodes(gm)

    def _promote(self, gm: torch.fx.GraphModule, mixed: Mapping[torch.fx.Node, Any]) -> None:
        """Insert casts before and after those of these nodes that promote types, by their rules.

        The exporter runs every node again for that. What each gives is known here.
        """
        interpreter = self._interpreter(gm, self._promotions)
        interpreter.env = {n: n.meta["val"] for n in gm.graph.nodes if "val" in n.meta}
        mode = fake_mode_of(list(interpreter.env.values()))
        with faking(mode), preserve_node_meta():
            for node, rule in mixed.items():
                with interpreter._set_current_node(node):
                    interpreter._maybe_promote_node(node, rule)

    def _rule_of(self, node: torch.fx.Node) -> Any:
        """How an operator promotes types that is given, or makes, more than one of them."""
        if not isinstance(node.target, OpOverload):
            return None
        rule = self._promotions.get_rule(node.target.overloadpacket)
        return rule if rule is not None and self._is_mixed(node) else None

    def _is_mixed(self, node: torch.fx.Node) -> bool:
        values = [node.meta.get("val"), *(each.meta.get("val") for each in node.all_input_nodes)]
        dtypes = {each.dtype for each in values if isinstance(each, torch.Tensor)}
        if len(dtypes) > 1 or any(isinstance(each, torch.SymInt) for each in values):
            return True
        numbers = [each for each in node.args if isinstance(each, int | float)]
        return bool(numbers) and not all(dtype.is_floating_point for dtype in dtypes)

    def translate(self, gm: torch.fx.GraphModule) -> onnx_ir.Model:
        """An ONNX model with an input for each placeholder and an output for each returned node."""
        for node in gm.graph.nodes:
            node.meta.setdefault("nn_module_stack", {})  # else a warning for every node without
        program = types.SimpleNamespace(
            graph_module=gm,
            graph_signature=_signature(gm),
            range_constraints={},
            constants={},
            named_parameters=tuple,
            named_buffers=tuple,
        )
        # onnx_ir warns of the empty list that stands for the shape of a number, the exporter of an
        # operator with several results for which it makes one.
        ir, exporter = logging.getLogger("onnx_ir._convenience"), self._core.logger
        with self._lock, _signatures_read_once(), _quiet(ir), _quiet(exporter):
            translated = self._core._exported_program_to_onnx_program(
                cast(Any, program), registry=self._registry
            )
        # A model without any node has no opset, which ONNX Runtime (1.31) refuses.
        translated.model.opset_imports.setdefault("", self._registry.opset_version)
        return translated.model


def registry_name(target: Any) -> str:
    """A node's target as the exporter's registry names it; equal in every process."""
    if isinstance(target, OpOverload | HigherOrderOperator):
        return cast(str, cast(Any, target).name())
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def onnx_decompositions(known: frozenset[str]) -> dict[Any, Callable[..., Any]]:
    """The exporter's table of decompositions, made without the exporter: that is slow to import.

    Args:
        known: The operators that it translates, and so does not decompose.
    """
    from torch._decomp import decomposition_table
    from torch.export import default_decompositions

    first: Any = default_decompositions()
    table: dict[Any, Callable[..., Any]] = {}
    for each, function in (*first.items(), *decomposition_table.items()):
        if isinstance(each, OpOverload) and registry_name(each) not in known:
            table.setdefault(each, function)
    return table


@contextlib.contextmanager
def _signatures_read_once() -> Iterator[None]:
    """Keep what the exporter reads from the schema of each ONNX operator.

    It would read it anew for every node it makes, a third of all its time (torch 2.13).
    """
    from onnx_ir import schemas

    read = staticmethod(functools.partial(_signature_of, schemas.OpSignature.from_op_schema))
    with _patched(schemas.OpSignature, "from_op_schema", read):
        yield


_signatures: dict[tuple[str, str, int], Any] = {}


def _signature_of(read: Callable[[Any], Any], schema: Any) -> Any:
    key = schema.domain, schema.name, schema.since_version
    if key not in _signatures:
        _signatures[key] = read(schema)
    return _signatures[key]


def _signature(gm: torch.fx.GraphModule) -> Any:
    from torch.export import graph_signature as export

    def argument(node: torch.fx.Node) -> Any:
        if isinstance(node.meta["val"], torch.Tensor):
            return export.TensorArgument(name=node.name)
        return export.SymIntArgument(name=node.name)

    placeholders = gm.graph.find_nodes(op="placeholder")
    (output,) = gm.graph.find_nodes(op="output")
    user_input, user_output = export.InputKind.USER_INPUT, export.OutputKind.USER_OUTPUT
    return export.ExportGraphSignature(
        [export.InputSpec(user_input, argument(node), None) for node in placeholders],
        [export.OutputSpec(user_output, argument(node), None) for node in output.args[0]],
    )


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# --- the processor --------------------------------------------------------------------------------


def multiplies_bf16() -> bool:
    """Whether the processor has bfloat16 products of its own: AVX512_BF16 or AMX; BF16 on Arm.

    ``torch.cpu.get_capabilities`` is public where there is one; torch 2.11 may have its parts only.
    oneDNN also says yes where it can but emulate them.
    """
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is None:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    found = ask()
    return any(found.get(each, False) for each in ("avx512_bf16", "amx_bf16", "bf16"))
