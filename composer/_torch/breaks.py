"""What the user compiled, and where Dynamo could not follow."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.fx
from torch._dynamo import OptimizedModule

from composer._torch.dynamo import FRAMES, UserFrame, called_frame, captured_graphs, user_frame
from composer._torch.names import optional

T = TypeVar("T")


def undisabled(compiled: T) -> T:
    """The callable within ``torch.compiler.disable``'s wrapper, or ``compiled`` itself.

    The wrapper of ``torch.compile`` keeps its original in the same attribute, but has to stay. A
    function's wrapper is told apart by torch's mark, and a module's wrapper by its context.
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
    """The arguments of ``torch.compile`` for a callable. Torch has no public way to ask."""

    original: Callable[..., Any]
    backend: Callable[..., Any]
    name: str
    mode: str | None
    options: dict[str, Any] | None
    dynamic: bool | None
    fullgraph: bool


@optional(
    "composer.explain of a function that was compiled before",
    "torch._dynamo.eval_frame:innermost_backend",
)
def compiled_as(function: Callable[..., Any]) -> Compiled | None:
    """The arguments with which a callable was compiled; ``None`` if it was not compiled.

    The callable is a compiled function, an ``OptimizedModule``, or a module after
    ``module.compile()``. The context of the compile is an attribute of an ``OptimizedModule``, and
    is in the closure of a function's wrapper.
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
    "composer.explain of functions that Dynamo gave up before",
    "torch._C._dynamo.eval_frame:reset_code",
    "torch._dynamo.convert_frame:input_codes.seen",
    "torch._dynamo.eval_frame:_debug_get_cache_entry_list",
)
def forget_given_up() -> None:
    """Make Dynamo try again the functions that it gave up, for any backend.

    Only code without cache entries is reset. Other code keeps its entries.
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


_Break = tuple[str, Sequence[traceback.FrameSummary], bool]

OnBreak = Callable[[str, Sequence[traceback.FrameSummary], bool], None]
"""Called at a graph break with torch's message, the traced frames (the innermost last), and true if
the whole function was given up. Before a call with true, there may be a call with false for the
same place."""


_BREAKS = (
    "torch._dynamo.convert_frame:ConvertFrameAssert.__call__",
    "torch._dynamo.exc:Unsupported",
    "torch._dynamo.exc:UserError",
    "torch._dynamo.symbolic_convert:InstructionTranslatorBase.log_graph_break",
)


@dataclass(frozen=True, slots=True)
class Uncaptured:
    """A frame of which Dynamo captured no graph.

    Attributes:
        frame: The frame.
        backend: The backend that it was compiled for.
        message: The reason in torch's words; empty if torch gives none.
        stack: The frames at the place where Dynamo stopped, the innermost last.
        given_up: True if the whole frame runs as plain Python. Otherwise Dynamo may capture graphs
            behind a graph break.
    """

    frame: UserFrame
    backend: Any
    message: str
    stack: Sequence[traceback.FrameSummary]
    given_up: bool


_listeners: ContextVar[tuple[OnBreak, ...]] = ContextVar("composer_breaks", default=())


@optional(
    "the list of graph breaks",
    *_BREAKS,
    without=lambda listener: contextlib.nullcontext(),
)
@contextlib.contextmanager
def graph_breaks_to(listener: OnBreak) -> Iterator[None]:
    """Tell ``listener`` of every graph break that this thread meets within.

    A graph carries the reason for its end (``compile_subgraph_reason``). Two kinds of break have no
    graph: a break that no operation precedes, and a function that Dynamo gives up. Dynamo logs the
    first kind, and raises an exception from the conversion of the frame for the second kind.
    """
    _follow_breaks()
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


@optional(
    "what Dynamo captured no graph of, in the report",
    *_BREAKS,
    *FRAMES,
    "torch._dynamo.convert_frame:CatchErrorsWrapper.__call__",
    "torch._dynamo.eval_frame:innermost_backend",
)
def when_uncaptured(listener: Callable[[Uncaptured], None]) -> None:
    """From now on, tell ``listener`` of each frame that is compiled and has no graph.

    These frames are the functions that Dynamo gives up, and those functions compiled by the program
    itself that Dynamo skips or finds no operation in. No backend is called for them. A function
    that raises under ``fullgraph`` is not reported.
    """
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    _follow_breaks()
    convert = CatchErrorsWrapper.__call__

    @functools.wraps(convert)
    def telling(self: Any, frame: Any, *args: Any) -> Any:
        before, breaks = captured_graphs(), list[_Break]()
        with graph_breaks_to(lambda *found: breaks.append(found)):
            made = convert(self, frame, *args)
        if captured_graphs() == before:
            skipped = str(getattr(made, "skip_reason", None) or "")
            last = breaks[-1] if breaks else None
            found = _uncaptured(self, frame, last, skipped)
            if found is not None:
                listener(found)
        return made

    cast(Any, CatchErrorsWrapper).__call__ = telling


@functools.cache
def _follow_breaks() -> None:
    """Patch Dynamo so that it tells the listeners of graph breaks from now on.

    This does not slow calls down, because Dynamo converts a frame once and not at every call.
    """
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.exc import Unsupported, UserError
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    log, convert = InstructionTranslatorBase.log_graph_break, ConvertFrameAssert.__call__

    @functools.wraps(log)
    def log_graph_break(translator: Any, code_options: Any, reason: str, exc: Any) -> None:
        _tell(exc, getattr(exc, "real_stack", ()), frame_skipped=False)
        log(translator, code_options, reason=reason, exc=exc)

    @functools.wraps(convert)
    def telling(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(self, frame, *args, **kwargs)
        except (Unsupported, UserError) as error:
            _tell(error, error.real_stack or [_whole(frame)], frame_skipped=True)
            raise

    cast(Any, InstructionTranslatorBase).log_graph_break = log_graph_break
    cast(Any, ConvertFrameAssert).__call__ = telling


def _uncaptured(wrapper: Any, frame: Any, met: _Break | None, skipped: str) -> Uncaptured | None:
    """A frame without a graph; ``None`` unless it was given up, or is what the program compiled.

    Args:
        wrapper: Dynamo's conversion of frames for one ``torch.compile``.
        frame: The frame, as Dynamo passes it.
        met: The last graph break in the frame; ``None`` if there was none.
        skipped: Dynamo's reason for skipping the frame (torch 2.13); empty if it did not skip it.
    """
    from torch._dynamo.eval_frame import innermost_backend

    gives_up = met is not None and met[2]
    if not (gives_up or _is_called(frame)):
        return None
    message, stack, given_up = met or (skipped, [_whole(frame)], bool(skipped))
    backend: Any = innermost_backend(wrapper)
    backend = getattr(backend, "compiler_fn", backend)
    return Uncaptured(user_frame(frame), backend, message, stack, given_up)


def _is_called(frame: Any) -> bool:
    """True if this is the frame of the callable that the program compiled and calls now."""
    from torch._dynamo import external_utils

    called = called_frame()
    if frame.f_code.co_filename == external_utils.__file__:
        return True
    return called is not None and frame.f_code is called.code


def _whole(frame: Any) -> traceback.FrameSummary:
    code = frame.f_code
    return traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)


def _tell(error: Any, stack: Sequence[traceback.FrameSummary], *, frame_skipped: bool) -> None:
    message = str(getattr(error, "msg", error))
    for listener in _listeners.get():
        listener(message, stack, frame_skipped)
