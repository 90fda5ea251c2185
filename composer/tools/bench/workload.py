"""``module:factory``: a function of the user that makes a model and the arguments of a call."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from composer.errors import OptionError
from composer.registry import did_you_mean
from composer.tools.bench.subject import Subject, subject_of


@dataclass(frozen=True, slots=True)
class Workload:
    """A factory and its arguments.

    Attributes:
        target: ``module:factory``, or ``path/script.py:factory``. The factory returns what
            :func:`~composer.tools.bench.subject.subject_of` describes.
        arguments: Keyword arguments of the factory.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """``"my_models:encoder(batch=8)"``."""
        if not self.arguments:
            return self.target
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.target}({arguments})"

    @property
    def is_script(self) -> bool:
        """True if the factory is in a script, whose module can have several names."""
        return self.target.rpartition(":")[0].endswith(".py")

    def build(self, imported: Callable[[], object] = lambda: None) -> Subject:
        """Import the factory and call it; its own errors are raised unchanged.

        Args:
            imported: Called between import and call, since the import may configure composer.

        Raises:
            OptionError: there is no such function, it takes other arguments, or its result has
                another form.
        """
        factory = self._factory()
        self._check_arguments(factory)
        imported()
        return subject_of(factory(**self.arguments), str(self))

    def _check_arguments(self, factory: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(factory)
        except ValueError:  # a builtin that does not say
            return
        try:
            signature.bind(**self.arguments)
        except TypeError as mistake:
            problem = "" if self.arguments else "; a factory is called without arguments"
            raise OptionError(f"{str(self)!r} cannot be called: {mistake}{problem}") from None

    def _factory(self) -> Callable[..., Any]:
        place, _, name = self.target.rpartition(":")
        if not place or not name:
            problem = "is not of the form MODULE:FACTORY, such as models:make"
            raise OptionError(f"{self.target!r} {problem}")
        module = _script(Path(place)) if self.is_script else _module(place)
        factory = getattr(module, name, None)
        if isinstance(factory, torch.nn.Module):
            problem = "is a model; name a function that returns (module, inputs)"
            raise OptionError(f"{self.target!r} {problem}")
        if not callable(factory):
            functions = [each for each, value in vars(module).items() if callable(value)]
            raise OptionError(f"{place!r} has no function {name!r}{did_you_mean(name, functions)}")
        return factory  # type: ignore[no-any-return]  # callable() does not tell mypy


def _module(name: str) -> ModuleType:
    """Import a module as ``python -m`` does: the working directory comes first."""
    if name.startswith(".") or "/" in name:
        raise OptionError(f"{name!r} is no module's name; the path of a script ends in .py")
    working_directory_first()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        raise OptionError(f"{name!r} cannot be imported: {error}") from error


def working_directory_first() -> None:
    """Let imports find modules of the working directory first, as ``python -m composer`` does."""
    if not sys.flags.safe_path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _script(path: Path) -> ModuleType:
    """Import a script as a module, with its folder first on the path, as ``python script.py``."""
    if not path.exists():
        raise OptionError(f"there is no script {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
