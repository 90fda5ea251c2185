"""The backends that composer knows by name, and how a chain's entry becomes a backend.

To add a backend, add a file to this package and a line to :data:`BACKENDS`.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from composer import _torch
from composer.backends.base import Backend, is_installed
from composer.backends.dynamo import CallableBackend, NamedBackend
from composer.errors import ComposerError, Refusal, UnknownNameError, import_failure
from composer.policy import DYNAMO, names_code
from composer.records import GraphRequest
from composer.registry import Registry, nearest, one_slip_apart
from composer.system import control_flow

BACKENDS: Registry[Any] = Registry(
    "backend",
    {
        "tensorrt": "composer.backends.tensorrt:TensorRTEngine",
        "inductor": "composer.backends.inductor:InductorBackend",
        "onnxrt": "composer.backends.onnxrt:OnnxRuntimeEngine",
        "openvino": "composer.backends.openvino:OpenVinoEngine",
        "eager": "composer.backends.eager:EagerBackend",
    },
    group="composer.backends",
)


_FOREIGN = {"tensorrt": ("torch_tensorrt", "composer.backends.torch_tensorrt:TorchTensorRTBackend")}
"""Packages that serve under the name of an engine of composer's if they are installed."""

ENGINES = ("tensorrt", "openvino", "onnxrt", "inductor")
"""Composer's own engines, in the order in which ``chain = "auto"`` tries them."""

_SLIP = 0.85
"""The similarity from which an unknown name counts as a misspelled known one.

Names that are :func:`~composer.registry.one_slip_apart` count, too.
"""

_LONG = 5
"""The length from which a known name may be misspelled in one letter.

Shorter names may differ in one letter only: ``tvm`` and ``tvx`` are two engines.
"""

_ALSO_CALLED = {
    **dict.fromkeys(("onnx", "onnxruntime", "onnx_runtime", "ort"), "onnxrt"),
    **dict.fromkeys(("torch_tensorrt", "tensor_rt", "trt"), "tensorrt"),
    **dict.fromkeys(("torchinductor", "torch_inductor", "triton"), "inductor"),
    "ov": "openvino",
}
"""Common names of engines whose backend has another name."""

_IN_DYNAMO = {"composer_openvino": "openvino"}
"""Names in Dynamo's registry of composer's own engines. A chain may use these names as well."""


def find_backend(spelled: str | Callable[..., Any]) -> Backend:
    """The backend that an entry of a chain stands for.

    An engine itself is not imported, only composer's own file for it. A name that is unknown here
    may be known on another machine. So it becomes a candidate that is ``unavailable``, unless the
    name is almost a known one.

    Args:
        spelled: A name, ``dynamo:name``, ``module:function``, a function or a backend class.

    Raises:
        UnknownNameError: the name looks misspelled, or ``module:function`` cannot be imported.
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
    """Composer's own engines that do not refuse this graph, as ``chain = "auto"`` orders them."""
    return tuple(name for name in ENGINES if is_here(name, request))


def is_here(name: str, request: GraphRequest) -> bool:
    """True if an engine's probe does not refuse a graph.

    An engine whose probe has a fault is tried, so that the fault becomes an attempt's record.
    """
    try:
        find_backend(name).probe(request)
    except Refusal:
        return False
    except BaseException as error:  # noqa: BLE001  # the attempt meets it again, and records it
        control_flow.pass_on(error)
    return True


def names() -> set[str]:
    """The names of all backends known here: those of composer, other packages and Dynamo."""
    return {*_torch.dynamo.list_backends(), *BACKENDS.names()}


def refuse_slip(name: str) -> None:
    """Refuse an unknown name if it is almost a known one, or a common name of a known engine.

    Raises:
        UnknownNameError: the message suggests the known name.
    """
    if name.startswith(DYNAMO):
        prefix, known, also_called = DYNAMO, {*_torch.dynamo.list_backends()}, dict[str, str]()
    else:
        prefix, known, also_called = "", names(), _ALSO_CALLED
    own = name.removeprefix(prefix)
    if own in known:
        return
    common_name = own.casefold().replace("-", "_")
    meant = also_called.get(common_name) or _misspelled(own, known)
    if meant:
        raise UnknownNameError(f"unknown backend {name!r}; did you mean {prefix + meant!r}?")


def _misspelled(name: str, known: Collection[str]) -> str | None:
    """The known name that an unknown one is a slip of; ``None`` if it is like none of them."""
    for candidate in sorted(known):
        if len(candidate) >= _LONG and one_slip_apart(name, candidate):
            return candidate
    return nearest(name, known, cutoff=_SLIP)


def _as_backend(engine: Callable[..., Any]) -> Backend:
    """The backend of a class or function."""
    if isinstance(engine, type) and issubclass(engine, Backend):
        return engine()
    return CallableBackend(engine)


def _given_by_program(name: str) -> Backend | None:
    """The backend that the program registered with Dynamo under one of composer's names.

    ``None`` if there is no such backend, or if torch, composer or an engine's package registered
    it:

    - ``torch_tensorrt`` registers ``tensorrt`` when it is imported. Composer's own backend
      ``tensorrt`` uses that package.
    - The openvino package registers ``openvino``. In a chain it is ``dynamo:openvino``.
    """
    function = _torch.dynamo.registered_backend(name)
    whose = getattr(function, "__module__", "").partition(".")[0]
    if function is None or whose in ("torch", "torch_tensorrt", "openvino", "composer"):
        return None
    return CallableBackend(function)


def _registered(name: str) -> Backend:
    """A backend of composer or of another package. If its import fails, its probe refuses."""
    package, path = _FOREIGN.get(name, ("", ""))
    try:
        if package and is_installed(package):
            return _as_backend(pkgutil.resolve_name(path))
        return _as_backend(BACKENDS.get(name))
    except ComposerError:  # for the user, such as a name that two packages have
        raise
    except BaseException as error:  # noqa: BLE001  # another package's module may raise anything
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
