"""The engines. A new one is a file here and a line in this table."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, NoReturn

from composer import _torch
from composer.backends.base import Backend
from composer.backends.dynamo import CallableBackend, NamedBackend
from composer.errors import ComposerError, UnknownNameError, import_failure
from composer.records import GraphRequest
from composer.registry import Registry, nearest, one_slip_apart
from composer.system import control_flow

BACKENDS: Registry[Any] = Registry(
    "backend",
    {
        "tensorrt": "composer.backends.tensorrt:TensorRTBackend",
        "inductor": "composer.backends.inductor:InductorBackend",
        "onnxrt": "composer.backends.onnxrt:OnnxRuntimeBackend",
        "openvino": "composer.backends.openvino:OpenVinoBackend",
        "eager": "composer.backends.eager:EagerBackend",
    },
    group="composer.backends",
)

DYNAMO = "dynamo:"
"""Before a name in a chain: what ``lookup_backend`` gives for it, whatever composer has by it."""

ENGINES = ("tensorrt", "openvino", "onnxrt", "inductor")
"""Composer's own, in the order in which ``chain = "auto"`` tries them."""

_SLIP = 0.85
"""How alike an unknown name and a known one must be to count as a slip of the pen, as must those
that are :func:`~composer.registry.one_slip_apart`."""

_LONG = 5
"""Letters that a name needs for one of them to be a slip: ``tvm`` and ``tvx`` are two engines."""

_ALSO_CALLED = {
    **dict.fromkeys(("onnx", "onnxruntime", "onnx_runtime", "ort"), "onnxrt"),
    **dict.fromkeys(("torch_tensorrt", "tensor_rt", "trt"), "tensorrt"),
    **dict.fromkeys(("torchinductor", "torch_inductor", "triton"), "inductor"),
    "ov": "openvino",
}
"""What people call an engine whose backend has another name."""

_IN_DYNAMO = {"composer_openvino": "openvino"}
"""Engines of composer's that Dynamo has by another name, which a chain may have as well."""


def find_backend(spelled: str | Callable[..., Any]) -> Backend:
    """What a chain's entry stands for; nothing is imported but composer's own file for it.

    A name that nobody here knows may well be known on another machine, so it becomes a candidate
    that is ``unavailable``, unless it is nearly a known one.

    Raises:
        UnknownNameError: the name looks like a slip, or ``module:function`` cannot be imported.
    """
    if not isinstance(spelled, str):
        return _as_backend(spelled)
    if spelled.removeprefix(DYNAMO) == "composer":
        raise UnknownNameError("composer cannot stand in its own chain")
    spelled = _IN_DYNAMO.get(spelled, spelled)
    if spelled in BACKENDS:
        return _given_by_program(spelled) or _registered(spelled)
    if names_code(spelled):
        return _as_backend(_import(spelled))
    refuse_slip(spelled)
    return NamedBackend(spelled.removeprefix(DYNAMO))


def installed_for(request: GraphRequest) -> tuple[str, ...]:
    """The engines of composer's that are installed and take a graph like this, as far as they see.

    They are in the order in which ``chain = "auto"`` tries them.
    """
    return tuple(name for name in ENGINES if is_here(name, request))


def is_here(name: str, request: GraphRequest) -> bool:
    """Whether an engine's probe has nothing against a graph."""
    try:
        find_backend(name).probe(request)
    except BaseException as error:  # noqa: BLE001  # it says no, or is another package's and broken
        control_flow.pass_on(error)
        return False
    return True


def names_code(spelled: object) -> bool:
    """Whether a name in a policy is ``module:name``, which is imported."""
    return isinstance(spelled, str) and ":" in spelled and not spelled.startswith(DYNAMO)


def names() -> set[str]:
    """Every engine that is known here by a name: composer's, other packages' and Dynamo's."""
    return {*_torch.dynamo.list_backends(), *BACKENDS.names()}


def refuse_slip(name: str) -> None:
    """Refuse a name that nobody here knows, if it is nearly a known one, or another word for one.

    Raises:
        UnknownNameError: with that one.
    """
    prefix = DYNAMO if name.startswith(DYNAMO) else ""
    known = {*_torch.dynamo.list_backends()} if prefix else names()
    own = name.removeprefix(prefix)
    if own in known:
        return
    slips = (each for each in sorted(known) if len(each) >= _LONG and one_slip_apart(own, each))
    meant = next(slips, None) or nearest(own, known, cutoff=_SLIP)
    if not prefix:
        meant = _ALSO_CALLED.get(own.casefold().replace("-", "_"), meant)
    if meant:
        raise UnknownNameError(f"unknown backend {name!r}; did you mean {prefix + meant!r}?")


def _as_backend(found: Callable[..., Any]) -> Backend:
    is_engine = isinstance(found, type) and issubclass(found, Backend)
    return found() if is_engine else CallableBackend(found)


def _given_by_program(name: str) -> Backend | None:
    """The backend that the program itself registered with Dynamo by a name of composer's.

    ``tensorrt`` is the one that is free. ``torch_tensorrt`` takes it as well, when it is imported;
    composer's own file for the name knows what to ask of that one. What the openvino package
    registers by its name is not asked for by it: ``dynamo:openvino`` is that one.
    """
    function = _torch.dynamo.registered_backend(name)
    whose = getattr(function, "__module__", "").partition(".")[0]
    if function is None or whose in ("torch", "torch_tensorrt", "openvino", "composer"):
        return None
    return CallableBackend(function)


def _registered(name: str) -> Backend:
    """A backend of composer's or of another package; one that cannot be imported says so later."""
    try:
        return _as_backend(BACKENDS.get(name))
    except ComposerError:  # the user's to hear: two packages have the name, say
        raise
    except BaseException as error:  # noqa: BLE001  # of another package's module, which may do anything
        control_flow.pass_on(error)
        return NamedBackend(name, functools.partial(_raise, error))


def _raise(error: BaseException, name: str) -> NoReturn:
    raise error.with_traceback(None)


def _import(path: str) -> Callable[..., Any]:
    if not all(path.partition(":")):
        raise UnknownNameError(f"backend {path!r} is not of the form 'module:function'")
    try:
        found = pkgutil.resolve_name(path)
    except BaseException as error:
        control_flow.pass_on(error)
        why = import_failure(error)
        raise UnknownNameError(f"backend {path!r} cannot be imported: {why}") from error
    if not callable(found):
        raise UnknownNameError(f"backend {path!r} is not callable: {found!r}")
    return found  # type: ignore[no-any-return]  # callable() leaves Any as it was
