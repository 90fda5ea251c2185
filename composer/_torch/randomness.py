"""Random numbers: generators, and whether a graph draws."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from composer._torch.compiles import patched
from composer._torch.fakes import as_fake
from composer._torch.operators import draws, parts_of


@contextlib.contextmanager
def frozen_generators() -> Iterator[None]:
    """Show this thread a frozen random state, and ignore its attempts to set it.

    AOTAutograd, Inductor and ``fork_rng`` restore the state that the generators had when they
    began. From a background thread that would make the program draw the same numbers once more.
    Other threads are not affected. To be used by one thread at a time, the one that compiles.
    """
    with contextlib.ExitStack() as undo:
        for modules in ((torch, torch.random), (torch.cuda,)):  # torch has two names of each
            read, write = _frozen_in_this_thread(modules[0].get_rng_state, modules[0].set_rng_state)
            for module in modules:
                undo.enter_context(patched(module, "get_rng_state", read))
                undo.enter_context(patched(module, "set_rng_state", write))
        yield


def _frozen_in_this_thread(
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
    """True if a graph draws random numbers for such inputs. The graph is run on fake inputs.

    Most functions that may draw do not: dropout when not training, attention without dropout.

    Raises:
        Exception: whatever the graph raises on fake inputs, if its control flow needs the data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    seen = _Seen()
    with mode, seen:
        run(*(as_fake(mode, value) for value in inputs))
    return seen.draws


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Watches the operators that are called below autograd for one that draws.

    The operators of attention are tagged as random even without dropout, so ``dropout_p`` decides.
    In inference mode, operators that are composed of others arrive here whole, so their parts are
    called and decide.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.draws = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_prim = func.namespace == "prim"  # the dispatcher has no entries for these
        decomposition = None if is_prim else parts_of(func)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        if draws(func):
            defaults = {each.name: each.default_value for each in func._schema.arguments}
            arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
            self.draws |= arguments.get("dropout_p") != 0.0  # an operator without it draws
        return func(*args, **kwargs)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: while any other kind of mode is active, Dynamo compiles nothing in any thread."""
        return True
