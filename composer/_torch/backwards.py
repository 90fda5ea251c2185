"""Compiled backwards, and the guard around them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.fx

from composer._torch.aot import boxed
from composer._torch.names import optional

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BuiltBackward:
    """A backward as an engine compiled it.

    Attributes:
        compiled: The compiled function. It takes its arguments in one list.
        graph: Returns the functional graph that the backward was compiled from; ``None`` if that
            graph was not kept.
        exact: True if :func:`compiled_from` recorded the graph. Otherwise it is the graph as
            AOTAutograd made it.
        donated: Positions of the arguments that the forward saved and the backward may write to.
    """

    compiled: Callable[[list[Any]], Any]
    graph: Callable[[], torch.fx.GraphModule | None]
    exact: bool
    donated: tuple[int, ...]


GuardBackward = Callable[[BuiltBackward], Callable[[list[Any]], Any]]
_guard_backward: ContextVar[GuardBackward | None] = ContextVar("composer_backward", default=None)


@optional(
    "falling back where a compiled backward fails",
    "torch._functorch._aot_autograd.runtime_wrappers:AOTDispatchAutograd.post_compile",
    without=lambda guard: contextlib.nullcontext(),
    lazily=True,
)
@contextlib.contextmanager
def backwards_by(guard: GuardBackward) -> Iterator[None]:
    """Replace each backward that is compiled within, on this thread, by what ``guard`` makes of it.

    AOTAutograd gives each compiled backward to autograd at one place, whether it is new or from
    AOTAutograd's cache. That place is patched. A backend's ``bw_compiler`` would not do: it does
    not see backwards from the cache, and only composer's own lowering has one to wrap.
    """
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    original = AOTDispatchAutograd.post_compile
    if not isinstance(original, functools.partial):  # replaced once, for good
        ours = functools.partial(_with_guard, original)
        AOTDispatchAutograd.post_compile = staticmethod(ours)  # type: ignore[method-assign]
    token = _guard_backward.set(guard)
    try:
        yield
    finally:
        _guard_backward.reset(token)


def _with_guard(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``post_compile`` with the backward replaced, if a guard is in force.

    AOTAutograd refuses ``retain_graph=True`` where memory is donated. The guard handles that case,
    so AOTAutograd is told that no memory is donated. Its cache keeps the metadata object, so a copy
    of that is changed.
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
    """The arguments of ``post_compile`` by name, and a function that calls it with some replaced.

    From torch 2.13 on, they are the fields of its first argument. Before, they are arguments of
    their own.
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


@optional(
    "backward(retain_graph=True) of Inductor's graphs",
    "torch._C._autograd:_get_current_graph_task_keep_graph",
    without=lambda: True,
)
def keeps_graph() -> bool:
    """True if the backward that runs on this thread keeps its graph, so another may follow."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _kept_backward(kept: Any) -> torch.fx.GraphModule | None:
    """The graph of a backward, which AOTAutograd keeps for compiled autograd.

    The graph of a backward from AOTAutograd's cache is read only now.
    """
    graph = getattr(kept, "bw_module", None)
    if graph is None and hasattr(kept, "bw_module_fn"):
        graph = kept.bw_module_fn()
    return cast(torch.fx.GraphModule | None, graph)


def compiled_from(graph: torch.fx.GraphModule, compiled: T) -> T:
    """Record which graph a backward was compiled from, for :func:`backwards_by`."""
    cast(Any, compiled)._composer_graph = graph
    return compiled
