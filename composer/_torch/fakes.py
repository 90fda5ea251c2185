"""Fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from composer._torch.names import optional


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """The mode that the fake tensors among ``values`` belong to; a new one if there are none."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(mode: FakeTensorMode, value: Any) -> Any:
    """The fake of a real tensor in ``mode``, with fixed sizes; any other value as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    return mode.from_tensor(value, static_shapes=True)


@contextlib.contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Run operations on fake tensors. A size that depends on data may get a new symbol."""
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
    """Enable torch's Python dispatcher, as Dynamo does.

    Without it, kernels fail if they call operators with symbols for sizes.
    """
    from torch._dispatch.python import enable_python_dispatcher

    return cast(contextlib.AbstractContextManager[None], enable_python_dispatcher())


def is_users_fake(value: object) -> bool:
    """True if the program itself made this tensor fake, so that calls will have no data either.

    The other fake tensors are torch's, such as the inputs of the graphs that DDP cuts. They belong
    to the fake mode of the compile.
    """
    mode = mode_of_compile()
    return isinstance(value, FakeTensor) and mode is not None and value.fake_mode is not mode


def mode_of_compile() -> FakeTensorMode | None:
    """The fake mode of the compile that Dynamo runs now; ``None`` outside of one."""
    return getattr(TracingContext.try_get(), "fake_mode", None)


def fake_of_fixed_size(value: torch.Tensor) -> FakeTensor | None:
    """A fake tensor with fixed sizes, for a tensor that Dynamo has not seen.

    Where sizes are dynamic by default, AOTAutograd would give such a tensor symbols that nobody
    knows. The caller has to keep the fake tensor until AOTAutograd has met it.

    Returns:
        ``None`` outside of a compile.
    """
    mode = mode_of_compile()
    return None if mode is None else mode.from_tensor(value, static_shapes=True)


def share_fake(original: torch.Tensor, copy: torch.Tensor) -> None:
    """Make AOTAutograd use the original's fake tensor for the copy.

    AOTAutograd finds the fake tensor of an input by identity. Otherwise a copy would get symbols of
    its own, and views would lose the base that they share. Outside of a compile nothing is done.
    """
    mode = mode_of_compile()
    if mode is None:
        return
    fake = _fake_in(mode, original)
    mode.fake_tensor_converter.set_tensor_memo(copy, fake)
    cast(Any, copy)._composer_fake = fake  # the memo holds it weakly; the copy keeps it alive


def _fake_in(mode: FakeTensorMode, value: Any) -> Any:
    """The fake of a tensor in a compile's own mode, which is kept there as long as it lives."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    symbolic = symbolic_context(value)
    source = getattr(symbolic, "tensor_source", None)
    return mode.from_tensor(value, symbolic_context=symbolic, source=source, trace=False)


def symbolic_context(value: torch.Tensor) -> Any:
    """Which sizes of a tensor are symbols in this compile; ``None`` if Dynamo does not say."""
    context = TracingContext.try_get()
    return None if context is None else cast(Any, context.tensor_to_context).get(value)


def fakes_of(inputs: Sequence[torch.Tensor], dynamic: Iterable[int]) -> list[FakeTensor]:
    """Fakes of tensors in a new mode, as Dynamo makes them.

    The first size of the tensors at the positions ``dynamic`` gets a symbol.
    """
    mode, symbolic = FakeTensorMode(shape_env=ShapeEnv()), frozenset(dynamic)

    def fake(i: int, value: torch.Tensor) -> FakeTensor:
        if i not in symbolic:
            return mode.from_tensor(value, static_shapes=True)
        kinds = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (value.dim() - 1)]
        context: Any = StatelessSymbolicContext(kinds)
        return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(f"x{i}"))

    return [fake(i, value) for i, value in enumerate(inputs)]


def fakes_met(inputs: Sequence[Any]) -> list[Any]:
    """The fake tensors, with their symbols, that AOTAutograd uses for inputs in this compile.

    Call this before AOTAutograd runs, and keep the result for :func:`recompiling`.
    """
    mode = mode_of_compile()
    if mode is None:
        mode = FakeTensorMode()
        return [as_fake(mode, value) for value in inputs]
    return [_fake_in(mode, value) for value in inputs]


def forget_met(mode: FakeTensorMode) -> None:
    """Drop the weak references that a mode keeps to the tensors that it has met.

    ``torch.utils.swap_tensors`` refuses tensors that have weak references. Dynamo clears those of
    its own modes after a compile. A tensor that the mode meets again gets a new fake tensor.
    """
    met = mode.fake_tensor_converter.meta_converter.describer
    met.lookup_tensor.clear()
    met.lookup_storage.clear()
