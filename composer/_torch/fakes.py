"""Fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

from composer._torch.names import optional


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
    shape_env = mode.shape_env
    fresh = shape_env.ignore_fresh_unbacked_symbols() if shape_env else contextlib.nullcontext()
    with fresh, mode, _python_dispatcher():
        yield


@optional(
    "operators with symbols for sizes in decompositions",
    "torch._dispatch.python:enable_python_dispatcher",
    without=contextlib.nullcontext,
)
def _python_dispatcher() -> contextlib.AbstractContextManager[None]:
    """As Dynamo does: kernels that call operators with symbols for sizes fail without it."""
    from torch._dispatch.python import enable_python_dispatcher

    return cast(contextlib.AbstractContextManager[None], enable_python_dispatcher())


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
