"""Any other backend: a name that Dynamo knows, or a callable of the user's own."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.backends.base import Backend, Build, BuildRequest
from composer.backends.foreign import foreign
from composer.errors import OptionError, Refusal, import_failure, refuse
from composer.passes import fingerprint
from composer.records import GraphRequest, Reason, Status
from composer.system import control_flow

_PACKAGES = {"openxla": "torch_xla", "openxla_eval": "torch_xla", "tvm": "tvm"}
"""What Dynamo's own backends import when they compile, once AOTAutograd has traced the graph."""


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    """The backends of other packages, by name; cached, since looking for them is slow."""
    groups = ("composer.backends", "torch_dynamo_backends")
    return {each.name: each for group in groups for each in entry_points(group=group)}


class CallableBackend(Backend):
    """A function ``(gm, example_inputs) -> callable``, with ``options=`` if it has options."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def identity(self) -> str | None:
        """A digest of its source and of what it closes over; an object may have a ``uuid()``."""
        uuid = getattr(self.function, "uuid", None)
        says = self.function if uuid is None else uuid()
        try:
            return fingerprint.digest(says, fingerprint.file_of(self.function))
        except fingerprint.Unstable:
            return None

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Options need a function that takes them."""
        name = getattr(self.function, "__name__", None) or type(self.function).__name__
        _refuse_options(name, self.function, options)

    def build(self, request: BuildRequest) -> Build:
        """Call the function; ``mode`` is not passed on, since only torch's own engines know it."""
        if known := foreign(self.function):
            return Build(known.compiled_by(self.function, request))
        options = {"options": dict(request.options)} if request.options else {}
        return Build(self.function(request.gm, request.example_inputs, **options))


class NamedBackend(Backend):
    """A name looked up when it is needed, by default in Dynamo's registry.

    Args:
        name: The backend's name.
        lookup: Gives the function that the name stands for, or raises.
    """

    def __init__(
        self,
        name: str,
        lookup: Callable[[str], Callable[..., Any]] = _torch.dynamo.lookup_backend,
    ) -> None:
        self.name = name
        self._lookup = lookup

    def probe(self, request: GraphRequest) -> None:
        """Refuse when no package here registers the name, or its package is not here."""
        whose = str(getattr(self._function(), "__module__", ""))
        package = _PACKAGES.get(self.name) if whose.startswith("torch.") else None
        if package and not _is_installed(package):
            what = f"backend {self.name!r} needs the package {package!r}, which is not installed"
            refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, what)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Options need a function that takes them, as far as it is loaded: this loads nothing."""
        function = _torch.dynamo.registered_backend(self.name)
        if function is not None:
            _refuse_options(self.name, function, options)

    def identity(self) -> str | None:
        """The identity of what the name stands for.

        For an entry point of another package that is the package's version and the module's source,
        since loading it would import the engine.
        """
        entry = _entry_points().get(self.name)
        if entry is not None:
            package = (entry.dist.name, entry.dist.version) if entry.dist else ()
            source = fingerprint.source_not_imported(entry.module)
            return fingerprint.digest(entry.value, package, source)
        function = self._function()
        if type(function).__module__.startswith("torch."):  # an object, as for cudagraphs
            return fingerprint.digest(self.name, torch.__version__)
        return CallableBackend(function).identity()

    def build(self, request: BuildRequest) -> Build:
        """Look the name up and call what it stands for."""
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


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is imported, by a stub that says not from where
        return True


def _refuse_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that the function cannot be given; ``name`` is as the chain spells it."""
    if options and not _takes_options(function):
        raise OptionError(f"backend {name!r} takes no options=, but is given {dict(options)}")


def _takes_options(function: Callable[..., Any]) -> bool:
    """Torch's own of a compiler take any keyword, and do nothing with it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not say
        return True
    of = inspect.unwrap(getattr(function, "func", function))
    anything = not str(getattr(of, "__module__", "")).startswith("torch.")
    return any(p.name == "options" or (anything and p.kind is p.VAR_KEYWORD) for p in parameters)
