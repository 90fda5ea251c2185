"""Modes, and what autograd saves: grad mode, autocast, hooks."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch import overrides
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from composer._torch.names import optional, optional_value


class _NeverRaised(BaseException):
    """Stands for an exception that this torch does not have."""


StopRecomputation: type[BaseException] = optional_value(
    "ending the second forward of a checkpoint early",
    "torch.utils.checkpoint:_StopRecomputationError",
    without=_NeverRaised,
)
"""The exception by which a checkpoint ends its second forward. It is raised within the operation
that saves the last tensor."""


def autocasts() -> list[tuple[str, torch.dtype]]:
    """The devices for which autocast is on, each with its dtype."""
    devices = filter(torch.is_autocast_enabled, ("cpu", "cuda"))
    return [(device, torch.get_autocast_dtype(device)) for device in devices]


_FLOAT32_SETTINGS = (
    ("generic", "all"),
    *(("cuda", each) for each in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", each) for each in ("all", "matmul", "conv", "rnn")),
)
"""Settings of ``torch.backends``. A setting that is not set itself follows a more general one,
which stands before it. They are read by their private names, because
``torch.backends.mkldnn.fp32_precision`` sets the precision of all (torch 2.11 to 2.15)."""


def float32_precision() -> tuple[str, ...]:
    """The precisions in which torch computes float32.

    Returns:
        The precision of matrix products (``"highest"``, ``"high"`` or ``"medium"``), then each
        newer setting. The first is empty if it cannot express the newer settings. Then
        ``torch.get_float32_matmul_precision`` raises.
    """
    try:
        of_products = torch.get_float32_matmul_precision()
    except RuntimeError:
        of_products = ""
    return of_products, *_newer_settings()


_PRECISION = "telling the newer settings of float32 apart (torch.backends.*.fp32_precision)"


@optional(_PRECISION, "torch._C:_get_fp32_precision_getter", without=lambda: ())
def _newer_settings() -> tuple[str, ...]:
    return tuple(torch._C._get_fp32_precision_getter(*each) for each in _FLOAT32_SETTINGS)


@optional(_PRECISION, "torch._C:_set_fp32_precision_setter")
def _set_newer_settings(settings: Sequence[str]) -> None:
    for names, setting in zip(_FLOAT32_SETTINGS, settings, strict=True):
        torch._C._set_fp32_precision_setter(*names, setting)


def set_float32_precision(precisions: Sequence[str]) -> None:
    """Set the precisions of float32 to those that :func:`float32_precision` has returned."""
    of_products, *settings = precisions
    # Setting it changes the newer settings as well, which are then set to their exact values.
    torch.set_float32_matmul_precision(of_products or "highest")
    _set_newer_settings(settings)


_AUTOCAST = "regions of autocast within a graph"
_enter_autocast = optional_value(_AUTOCAST, "torch.amp.autocast_mode:_enter_autocast", without=None)
_exit_autocast = optional_value(_AUTOCAST, "torch.amp.autocast_mode:_exit_autocast", without=None)
_set_grad_enabled = optional_value(
    "regions of another grad mode within a graph", "torch._C:_set_grad_enabled", without=None
)


def enters_autocast(target: Any) -> bool:
    """True if a graph's node opens a region of autocast."""
    return target is _enter_autocast


def autocast_dtype(node: torch.fx.Node) -> torch.dtype | None:
    """The dtype of the region of autocast that a graph's node opens; ``None`` for other nodes."""
    if node.target is not _enter_autocast:
        return None
    device, dtype, is_enabled, *_ = node.args
    if not is_enabled:
        return None
    return cast("torch.dtype | None", dtype) or torch.get_autocast_dtype(str(device))


def changes_autocast(target: Any) -> bool:
    """True if a graph's node opens or closes a region of autocast."""
    return target is _enter_autocast or target is _exit_autocast


def changes_state(target: Any) -> bool:
    """True if a graph's node changes grad mode or autocast for the nodes behind it."""
    return target is _set_grad_enabled or changes_autocast(target)


_FUNCTORCH = ("torch._functorch", "torch._C._functorch", "torch.autograd", "torch._C._autograd")


def belongs_to_functorch(target: Any) -> bool:
    """True if a function belongs to ``torch.autograd`` or to what ``torch.func`` is made of."""
    return str(getattr(target, "__module__", "")).startswith(_FUNCTORCH)


def sets_modes(target: Any) -> bool:
    """True if a graph's node may set a mode that :func:`restored_modes` puts back."""
    return changes_state(target) or belongs_to_functorch(target)


def _leave_inference_modes(error: BaseException) -> None:
    """Leave the inference modes that a graph has entered and not left.

    They are local variables of the graph's code, and are found in the frames of the traceback.
    """
    kind: Any = torch._C._InferenceMode
    entered = contextlib.ExitStack()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, kind):
                entered.push(value)
    entered.close()


class _Autocast:
    """The depth to which autocast is nested, its dtypes, and whether it caches.

    Whether autocast is on is kept in dispatch keys, not here.
    """

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        devices = {"cpu", "cpu" if accelerator is None else accelerator.type}
        self._depth = self._nesting()
        self._caches = torch.is_autocast_cache_enabled()
        self._dtypes = {device: torch.get_autocast_dtype(device) for device in devices}

    @staticmethod
    def _nesting() -> int:
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        return depth

    def put_back(self) -> None:
        """Leave the regions entered since. The last one clears autocast's copies of weights."""
        for _ in range(self._nesting() - self._depth):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._caches)
        for device, dtype in self._dtypes.items():
            torch.set_autocast_dtype(device, dtype)


@optional(
    "putting back the modes that a graph had set when it raised",
    "torch._C:_InferenceMode",
    "torch._C:_ForceDispatchKeyGuard",
    "torch._C:_dispatch_tls_local_include_set",
    "torch._C:_dispatch_tls_local_exclude_set",
    "torch._C:_exit_dual_level",
    "torch._C:_set_grad_enabled",
    "torch._C:_is_fwd_grad_enabled",
    "torch._C:_set_fwd_grad_enabled",
    "torch._C._functorch:get_dynamic_layer_stack_depth",
    "torch._C._functorch:pop_dynamic_layer_stack",
    "torch._C._autograd:_saved_tensors_hooks_get_disabled_error_message",
    without=contextlib.nullcontext,
)
@contextlib.contextmanager
def restored_modes() -> Iterator[None]:
    """Restore the modes of the program if a graph raises after it has set other modes.

    A captured graph sets grad mode, autocast and the levels of ``torch.func`` by ordinary calls,
    without a ``finally`` that restores them. After a graph has raised, ``torch.compile`` (2.13)
    itself restores only grad mode and the hooks of saved tensors.
    """
    from torch._C import _functorch

    autograd: Any = torch._C._autograd
    hooks_disabled_by = autograd._saved_tensors_hooks_get_disabled_error_message()
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
                # One at a time: torch's function that pops down to a depth pops too many in 2.11.
                _functorch.pop_dynamic_layer_stack()
            if not within_dual_level:
                with contextlib.suppress(RuntimeError):  # raised if the graph has entered no level
                    torch._C._exit_dual_level(level=0)
            torch._C._set_grad_enabled(grad)
            torch._C._set_fwd_grad_enabled(forward)
            if hooks_disabled_by is None:
                autograd._saved_tensors_hooks_enable()
            else:
                autograd._saved_tensors_hooks_disable(hooks_disabled_by)
            raise


@optional(
    "leaving calls with tangents (torch.autograd.forward_ad) to eager",
    "torch.autograd.forward_ad:_current_level",
    without=lambda: False,
)
def is_forward_mode() -> bool:
    """True if a level of ``torch.autograd.forward_ad`` is open: tensors may carry tangents."""
    return forward_ad._current_level >= 0


@optional(
    "compiling anew for calls with tangents (torch.autograd.forward_ad)",
    "torch._dynamo.guards:GuardBuilder.DUAL_LEVEL",
    "torch._dynamo.source:GlobalStateSource",
)
def compile_anew_in_forward_mode() -> None:
    """Make Dynamo compile the current graph again when :func:`is_forward_mode` changes.

    Dynamo (torch 2.11 to 2.15) guards on it only if a function opens a level itself. Outside of
    Dynamo nothing is done.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import GlobalStateSource

    context = TracingContext.try_get()
    if context is not None:
        guard = GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL)
        context.guards_context.dynamo_guards.add(guard)


@optional(
    "calling torch's functions directly where no mode watches",
    "torch.overrides:_get_current_function_mode_stack",
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    without=lambda: True,
)
def is_watched() -> bool:
    """True if a mode is active that may change what is called (``torch.set_default_device``)."""
    function_modes: Any = overrides._get_current_function_mode_stack
    return bool(function_modes() or _python_dispatch._get_current_dispatch_mode_stack())


@optional(
    "checkpoints around a graph with a backward of an engine",
    "torch._C._autograd:_saved_tensors_hooks_is_enabled",
    "torch._C._autograd:_top_saved_tensors_default_hooks",
    without=contextlib.nullcontext,
)
def without_save_hooks() -> contextlib.AbstractContextManager[Any]:
    """Hide what autograd saves from the hooks of a checkpoint, which counts saved tensors.

    The tensors are saved detached. Otherwise an output that its own ``grad_fn`` saves would be part
    of a reference cycle and never be freed, as torch's documentation of the hooks warns. If no
    hooks are set, this function sets none, because ``torch.func`` refuses to differentiate while
    hooks are set. Torch has no public way to ask whether hooks are set, or may be set.
    """
    autograd: Any = torch._C._autograd  # torch's stub leaves these out
    is_allowed = autograd._saved_tensors_hooks_is_enabled()
    if not is_allowed or autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


@contextlib.contextmanager
def own_backward(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Run a backward of composer's own, without the hooks of these tensors and without tracing.

    Torch has no public way to remove all hooks of a tensor and restore them. Nor has it one to
    suspend the tracing of backwards (``compiled_autograd``) that the program has switched on.
    """
    kept = [(each, each._backward_hooks) for each in tensors if each._backward_hooks]
    for tensor, _ in kept:
        tensor._backward_hooks = None
    try:
        with _untraced():
            yield
    finally:
        for tensor, hooks in kept:
            tensor._backward_hooks = hooks


@optional(
    "comparing gradients where the program traces backwards (compiled autograd)",
    *(
        f"torch._dynamo.compiled_autograd:{each}"
        for each in ("compiled_autograd_enabled", "_disable")
    ),
    without=contextlib.nullcontext,
)
def _untraced() -> contextlib.AbstractContextManager[Any]:
    from torch._dynamo import compiled_autograd

    traced = compiled_autograd.compiled_autograd_enabled
    return compiled_autograd._disable() if traced else contextlib.nullcontext()
