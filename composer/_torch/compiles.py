"""Compiles that Dynamo does not run: after its own compile, beside it, or within another."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo.convert_frame import compile_lock as compile_lock
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from composer._torch.fakes import as_fake, fake_mode_of, forget_met
from composer._torch.names import optional
from composer._torch.sources import example_values
from composer._torch.symbols import with_values
from composer.system import forks


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or a class within, and restore it at the end.

    Only one thread at a time may patch an attribute. If two did, the last one to end could restore
    the wrong value.
    """
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile as Dynamo does: one compile at a time in the process.

    Before torch 2.14, FX has one flag for all threads that says that FX traces
    (https://github.com/pytorch/pytorch/pull/168999). Two compiles at once leave the flag set for
    good, and then every compiled function refuses to run.
    """
    with compile_lock, _calls_allowed():
        yield


@optional(
    "calls of other threads while an engine is compiled",
    "torch.fx._symbolic_trace:is_fx_symbolic_tracing",
    without=contextlib.nullcontext,
)
@contextlib.contextmanager
def _calls_allowed() -> Iterator[None]:
    """Let other threads call compiled functions while FX traces in this one.

    A compiled function refuses to run while FX traces, and before torch 2.14 it cannot tell which
    thread traces. ``torch.compiler.is_compiling()`` would make it run as well, but is read by the
    user's own code in other threads. So only the question of compiled functions is answered
    otherwise. They hold the function that they ask, so the code of that function is replaced.
    ``tests/_torch`` fails when this is no longer needed.
    """
    before = _asked_by_calls.__code__
    if hasattr(torch.fx._symbolic_trace, _TRACES):
        _asked_by_calls.__code__ = _no_trace.__code__
    try:
        yield
    finally:
        _asked_by_calls.__code__ = before


def _no_trace() -> bool:
    return False


_TRACES = "_is_fx_tracing_flag"
_asked_by_calls: Any = getattr(torch.fx._symbolic_trace, "is_fx_symbolic_tracing", _no_trace)
_UNCHANGED = _asked_by_calls.__code__


@optional(
    "children that are forked from a process that used a device",
    *(f"torch.{each}:_is_in_bad_fork" for each in ("cuda", "xpu", "mtia")),
    without=lambda: False,
)
def is_in_bad_fork() -> bool:
    """True if this process was forked from one that used a device. Then it cannot use the device.

    The public way to find out is to use the device, and that raises.
    """
    devices = (torch.cuda, torch.xpu, torch.mtia)
    return any(each._is_in_bad_fork() for each in devices)


@optional(
    "torch.compiler.is_compiling() in a child that was forked during a compile of another thread",
    "torch.compiler:_is_compiling_flag",
)
def _end_others_compile() -> None:
    torch.compiler._is_compiling_flag = False


@forks.in_child
def _forget_other_threads_compile() -> None:
    """In a forked child, free the compile lock if another thread held it, and reset its flags.

    That thread does not exist in the child, so nothing else would do it.
    """
    if forks.freed(compile_lock):
        _end_others_compile()
        _asked_by_calls.__code__ = _UNCHANGED
        tracing = torch.fx._symbolic_trace
        if hasattr(tracing, _TRACES):  # from torch 2.14 on each thread has its own
            setattr(tracing, _TRACES, False)


@contextlib.contextmanager
def captured_with(fakes: Sequence[Any], inputs: Sequence[Any]) -> Iterator[None]:
    """Compile within a compile: AOTAutograd takes ``fakes`` for the fake tensors of ``inputs``.

    AOTAutograd writes what it finds out to the context of the compile. So the inner compile gets a
    context of its own.
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
    fakes = example_values(gm)
    sizes = {i: fake for i, fake in enumerate(fakes) if isinstance(fake, torch.SymInt)}
    values = [inputs[i] for i in sizes]
    with compiling(), with_values(sizes.values(), values):  # another thread may capture it again
        if not any(isinstance(fake, FakeTensor) for fake in fakes):
            yield
            return
        try:
            with captured_with(fakes, inputs):
                yield
        finally:
            forget_met(fake_mode_of(fakes))


@contextlib.contextmanager
def recompiling(fakes: Sequence[Any]) -> Iterator[None]:
    """Compile for the fake tensors of a compile that is over (:func:`fakes_met`)."""
    with compiling(), tracing(TracingContext(fake_mode_of(fakes))):
        yield


@contextlib.contextmanager
def as_if_captured(inputs: Sequence[Any]) -> Iterator[None]:
    """Compile as within Dynamo's compile, for inputs with fixed sizes.

    Without Dynamo's fake mode, Inductor fails on a graph that contains graphs (``torch.cond``).
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with captured_with([as_fake(mode, value) for value in inputs], inputs):
        yield
