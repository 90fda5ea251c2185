"""What the user compiled, and where Dynamo could not follow."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.fx
from torch._dynamo import OptimizedModule

from composer import forks
from composer._torch.names import optional

T = TypeVar("T")


def undisabled(compiled: T) -> T:
    """The callable within ``torch.compiler.disable``'s wrapper, or ``compiled`` itself.

    The wrapper of ``torch.compile`` keeps its original in the same attribute, but is no wrapper
    to take off: the mark tells them apart, and the context where a module was wrapped.
    """
    if isinstance(compiled, OptimizedModule) and not _compiles(compiled):
        return cast(T, compiled._orig_mod)
    if not getattr(compiled, "_torchdynamo_disable", False):
        return compiled
    return cast(T, getattr(compiled, "_torchdynamo_orig_callable", compiled))


@optional(
    "looking into modules within torch.compiler.disable",
    "torch._dynamo.eval_frame:DisableContext",
    without=lambda module: True,
)
def _compiles(module: OptimizedModule) -> bool:
    from torch._dynamo.eval_frame import DisableContext

    return not isinstance(module.dynamo_ctx, DisableContext)


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


@optional(
    "composer explain of a function that was compiled before",
    "torch._dynamo.eval_frame:innermost_backend",
)
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
    from torch._dynamo.eval_frame import innermost_backend

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


@optional(
    "composer explain of functions that Dynamo gave up before",
    "torch._C._dynamo.eval_frame:reset_code",
    "torch._dynamo.convert_frame:input_codes.seen",
    "torch._dynamo.eval_frame:_debug_get_cache_entry_list",
)
def forget_given_up() -> None:
    """Have Dynamo try again the functions that it gave up on, for whatever backend that was.

    Only code without cache entries is reset; other code keeps its entries.
    """
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo import convert_frame, eval_frame

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


@optional(
    "the list of graph breaks in composer explain",
    "torch._dynamo.convert_frame:ConvertFrameAssert.__call__",
    "torch._dynamo.exc:Unsupported",
    "torch._dynamo.exc:UserError",
    "torch._dynamo.symbolic_convert:InstructionTranslatorBase.log_graph_break",
    without=lambda listener: contextlib.nullcontext(),
)
@contextlib.contextmanager
def graph_breaks_to(listener: OnBreak) -> Iterator[None]:
    """Tell ``listener`` of every graph break, in the thread that compiles.

    A graph carries the reason for its end (``compile_subgraph_reason``), but no graph does for a
    break that no operation precedes, or for a function that Dynamo gives up. It logs the former;
    the latter leave the conversion of the frame as exceptions.
    """
    with _listening:
        if not _listeners:
            _watch()
        _listeners.append(listener)
    try:
        yield
    finally:
        with _listening:
            _listeners.remove(listener)
            if not _listeners:
                _watch_no_more()


def _watch() -> None:
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    translator: Any = InstructionTranslatorBase
    translator.log_graph_break = _telling_log(translator.log_graph_break)
    convert: Any = ConvertFrameAssert
    convert.__call__ = _telling_convert(convert.__call__)


def _watch_no_more() -> None:
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    translator: Any = InstructionTranslatorBase
    translator.log_graph_break = translator.log_graph_break.__wrapped__
    convert: Any = ConvertFrameAssert
    convert.__call__ = convert.__call__.__wrapped__


def _telling_log(log: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(log)
    def log_graph_break(translator: Any, code_options: Any, reason: str, exc: Any) -> None:
        _tell(exc, getattr(exc, "real_stack", ()), frame_skipped=False)
        log(translator, code_options, reason=reason, exc=exc)

    return log_graph_break


def _telling_convert(convert: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import Unsupported, UserError

    @functools.wraps(convert)
    def __call__(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        try:
            return convert(self, frame, *args, **kwargs)
        except (Unsupported, UserError) as error:
            code = frame.f_code
            whole = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
            _tell(error, error.real_stack or [whole], frame_skipped=True)
            raise

    return __call__


def _tell(error: Any, stack: Sequence[traceback.FrameSummary], *, frame_skipped: bool) -> None:
    message = str(getattr(error, "msg", error))
    for listener in tuple(_listeners):
        listener(message, stack, frame_skipped)
