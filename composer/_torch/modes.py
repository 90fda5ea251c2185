"""Modes, and what autograd saves: grad mode, autocast, hooks."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch._C import _functorch
from torch._dynamo import compiled_autograd
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import GlobalStateSource
from torch._guards import TracingContext
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm
from torch.utils.checkpoint import _StopRecomputationError

StopRecomputation = _StopRecomputationError
"""How a checkpoint ends its second forward: raised within whatever saves the last tensor."""


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


def is_functorchs(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith(_FUNCTORCH)


def sets_modes(target: Any) -> bool:
    """Whether a graph's node may set what :func:`modes_put_back` puts back."""
    return changes_state(target) or is_functorchs(target)


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
