"""Backends that are not composer's: a name in Dynamo's registry, or a callable of the user."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import torch
import torch.fx

from composer import _torch
from composer.backends.base import Backend, Build, BuildRequest, Dialect, is_installed
from composer.backends.foreign import foreign
from composer.errors import OptionError, Refusal, import_failure, refuse
from composer.passes import digests
from composer.records import GraphRequest, Reason, Status
from composer.system import control_flow

_PACKAGES = {"openxla": "torch_xla", "openxla_eval": "torch_xla", "tvm": "tvm"}
"""Packages that Dynamo's own backends need. They import them late, when AOTAutograd has run."""


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    """The backends of other packages, by name. They are cached, since the search is slow."""
    groups = ("composer.backends", "torch_dynamo_backends")
    return {each.name: each for group in groups for each in entry_points(group=group)}


class CallableBackend(Backend):
    """Wraps a function ``(gm, example_inputs) -> callable``, which may take ``options=``.

    The function's attribute ``dialect`` has the meaning that it has on a backend.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.comes_with_torch = _is_torchs(function)
        self.dialect = _dialect_of(function)

    def identity(self) -> str | None:
        """A digest of the function's source and of the variables it closes over.

        If the function has a method ``uuid()``, its result is used instead.
        """
        uuid = getattr(self.function, "uuid", None)
        content = self.function if uuid is None else uuid()
        try:
            return digests.digest(content, digests.file_of(self.function))
        except digests.Unstable:
            return None

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse options if the function does not take them."""
        name = getattr(self.function, "__name__", None) or type(self.function).__name__
        _refuse_options(name, self.function, options)

    def build(self, request: BuildRequest) -> Build:
        """Call the function. ``mode`` is not passed on: only torch's own engines know it."""
        if known := foreign(self.function):
            return Build(known.compiled_by(self.function, request))
        if not request.options:
            return Build(self.function(request.gm, request.example_inputs))
        options = dict(request.options)
        return Build(self.function(request.gm, request.example_inputs, options=options))


class NamedBackend(Backend):
    """A backend that is looked up by its name when it is needed.

    Args:
        name: The backend's name.
        lookup: Returns the function of that name, or raises. By default it asks Dynamo's registry.
    """

    def __init__(
        self,
        name: str,
        lookup: Callable[[str], Callable[..., Any]] = _torch.dynamo.lookup_backend,
    ) -> None:
        self.name = name
        self._lookup = lookup
        own = _is_torchs(_torch.dynamo.registered_backend(name))
        self.comes_with_torch = own and name not in _PACKAGES

    def probe(self, request: GraphRequest) -> None:
        """Refuse if no installed package registers the name, or a package it needs is missing."""
        function = self._function()
        self.dialect = _dialect_of(function)  # known only when the function is loaded
        whose = str(getattr(function, "__module__", ""))
        package = _PACKAGES.get(self.name) if whose.startswith("torch.") else None
        if package and not is_installed(package):
            what = f"backend {self.name!r} needs the package {package!r}, which is not installed"
            refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, what)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse options if the function is loaded and does not take them. Loads nothing."""
        function = _torch.dynamo.registered_backend(self.name)
        if function is not None:
            _refuse_options(self.name, function, options)

    def identity(self) -> str | None:
        """The identity of the function that the name stands for.

        For an entry point of another package, it is made from the package's version and the
        module's source, since loading the entry point would import the engine.
        """
        entry = _entry_points().get(self.name)
        if entry is not None:
            package = (entry.dist.name, entry.dist.version) if entry.dist else ()
            source = digests.source_not_imported(entry.module)
            return digests.digest(entry.value, package, source)
        function = self._function()
        if type(function).__module__.startswith("torch."):  # an object, as for cudagraphs
            return digests.digest(self.name, torch.__version__)
        return CallableBackend(function).identity()

    def build(self, request: BuildRequest) -> Build:
        """Look up the name and call its function."""
        return CallableBackend(self._function()).build(request)

    def _function(self) -> Callable[..., Any]:
        try:
            return self._lookup(self.name)
        except _torch.dynamo.InvalidBackend:
            what = f"no installed package registers a Dynamo backend named {self.name!r}"
            refuse(Status.UNAVAILABLE, Reason.NOT_REGISTERED, what)
        except BaseException as error:
            control_flow.pass_on(error)
            why = import_failure(error)
            what = f"backend {self.name!r} is registered but cannot be imported: {why}"
            raise Refusal(Status.UNAVAILABLE, Reason.NOT_INSTALLED, what) from error


def _dialect_of(function: Callable[..., Any]) -> Dialect | None:
    """Return the dialect that a function takes; ``None`` if it does not say.

    Those that composer knows take any, but for torch's compiler of TorchScript.
    """
    known = _is_torchs(function) or foreign(function) is not None
    is_script = known and getattr(function, "__name__", "") == "torchscript"
    default = ("torch" if is_script else "any") if known else None
    return cast("Dialect | None", getattr(function, "dialect", default))


def _refuse_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise an ``OptionError`` if there are options and the function does not take any."""
    if options and not _takes_options(function):
        raise OptionError(f"backend {name!r} takes no options=, but is given {dict(options)}")


def _takes_options(function: Callable[..., Any]) -> bool:
    """True if a backend has a parameter ``options``, or accepts any keyword.

    Torch's own backends do not count for the second: they accept any keyword and ignore it.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    if any(parameter.name == "options" for parameter in parameters):
        return True
    if _is_torchs(function):
        return False
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _is_torchs(function: Any) -> bool:
    """Return True if a backend's code is a part of torch."""
    implementation: Any = inspect.unwrap(getattr(function, "func", function))
    return str(getattr(implementation, "__module__", "")).startswith("torch.")
