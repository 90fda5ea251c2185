"""One file to ship: a model's weights, its compiled calls, and what their engines keep on disk.

Torch saves a compiled function (``aot_compile``) if its guards can be saved. The guards on the code
of a Hugging Face model cannot. So the function that is compiled here takes and returns tensors
only, and keeps only the guards on these tensors and on torch's global state. The others would
notice that the program changed the model. But the file has no model that a program could change:
it has the captured graphs, and the tensors of the model in modules without code.

Engines keep their artefacts in the caches of composer and torch. Everything is compiled with empty
caches in a folder of its own, and that folder goes into the file.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer import _torch
from composer.backends import find_backend
from composer.errors import FallbackWarning, SavedFileError, error_line
from composer.graphs.clones import is_plain, put_back
from composer.records import CompileReport
from composer.system import disk, distribution, hardware
from composer.system.warned import warn_once
from composer.telemetry.report import Report
from composer.tools.warm_up import Call, check_call, warm_up

_HEADER = "header.json"
_MODEL = "model.pt"
_COMPOSER = "composer"
_INDUCTOR = "inductor"


def save(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    calls: Iterable[Call],
    *,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Compile a model for example calls, and write all that these calls need to one file.

    The model is compiled without gradients, under the caller's autocast. While it is compiled, the
    whole process uses empty caches, so let no other thread compile meanwhile. Buffers that the
    calls change are put back.

    Args:
        model: The model, in the mode (``eval()``) in which it is to run.
        path: The file to write.
        calls: The arguments of each call: a tuple of positional arguments, or a mapping of keyword
            arguments. The file has a graph for each of them. Tensors may change from call to call;
            all other arguments are constants.
        dynamic: As for ``torch.compile``. ``torch._dynamo.mark_dynamic`` works as well.
        options: As for ``torch.compile``: fields of :class:`composer.Policy`. They are in the file.

    Returns:
        The report of the graphs in the file; ``str()`` is a table.

    Raises:
        TypeError: arguments are neither a tuple nor a mapping, or have values of numpy.
        ValueError: a call has the same tensor twice, there is no call, or the model reads a tensor
            that is held by an object that is no module.
        Exception: whatever the model or a compile raises.
    """
    listed = list(calls)
    for index, call in enumerate(listed):
        check_call(index, call)
    if not listed:
        raise ValueError("composer.save needs at least one call")
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(Path(path).parent)!r}")
    options = {"model": f"{type(model).__module__}.{type(model).__qualname__}", **(options or {})}
    with tempfile.TemporaryDirectory() as name, torch.inference_mode(False), torch.no_grad():
        folder = Path(name)
        shipped = Shipped(_without_code(_Flat(model), {}), [])
        with _empty_caches(folder), _state_kept(model):
            added = [shipped.add(model, call, dynamic, options) for call in listed]
        reports = tuple(itertools.chain.from_iterable(added))
        # The model is read again, since calls may have given it other tensors.
        torch.save((_without_code(_Flat(model), {}), shipped.functions()), folder / _MODEL)
        (folder / _HEADER).write_text(json.dumps(_header(reports), indent=1))
        _write(folder, Path(path))
    return Report(reports)


def load(path: str | os.PathLike[str]) -> Shipped:
    """Load a file that :func:`save` wrote, and put its artefacts into the caches of this machine.

    The file is unpickled, which may run any code. Load only files that you trust.

    Args:
        path: The file.

    Returns:
        A function that takes and returns what the model does.

    Raises:
        SavedFileError: the file is damaged, or it cannot work here: it needs another version of
            torch, Python or composer, or a device or package that is missing. The message says so.
        FallbackWarning: it works, and engines are built again here, where warnings are errors.
        OSError: the file cannot be read.
    """
    with tempfile.TemporaryDirectory() as name, torch.inference_mode(False):
        folder = Path(name)
        with _reading(path), zipfile.ZipFile(path) as file:
            header = json.loads(file.read(_HEADER))
            _check(path, header)
            file.getinfo(_MODEL)
            file.extractall(folder)
        _add(folder / _COMPOSER, disk.cache_dir())
        _add(folder / _INDUCTOR, Path(_torch.inductor.inductor_cache_dir()))
        try:
            return Shipped(*torch.load(folder / _MODEL, weights_only=False))
        except (ImportError, AttributeError) as error:
            raise SavedFileError(
                f"{str(path)!r} needs a class or a package that is missing: {error}"
            ) from error


@dataclass(frozen=True)
class _Form:
    """Everything of a call but its tensors.

    Attributes:
        spec: How the arguments are nested.
        leaves: The arguments, with the class ``torch.Tensor`` in the place of each tensor.
        kinds: The classes of the leaves, since ``1 == True``.
    """

    spec: Any
    leaves: list[Any]
    kinds: list[type]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Form, list[torch.Tensor]]:
        """Return the form of a call, and its tensors.

        Raises:
            TypeError: an argument is, or holds, an array or a number of numpy.
        """
        for name, value in [*enumerate(args), *kwargs.items()]:
            if any(map(_is_of_numpy, _torch.tensors.tree_flatten(value)[0])):
                remedy = "give a tensor (torch.as_tensor), or a number of Python as a constant"
                raise TypeError(f"a value of numpy is in argument {name!r}: {remedy}")
        given, spec = _torch.tensors.tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
        inputs = [each for each in given if isinstance(each, torch.Tensor)]
        leaves = [torch.Tensor if isinstance(each, torch.Tensor) else each for each in given]
        return cls(spec, leaves, list(map(type, leaves))), inputs

    def call(self, inputs: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with these tensors."""
        given = iter(inputs)
        leaves = [next(given) if each is torch.Tensor else each for each in self.leaves]
        args, kwargs = _torch.tensors.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def __str__(self) -> str:
        """Return the arguments as a program would write them."""
        args, kwargs = self.call(itertools.repeat("tensor"))
        named = (f"{name}={each}" for name, each in kwargs.items())
        return f"({', '.join((*map(str, args), *named))})"


def _is_of_numpy(value: Any) -> bool:
    """Return True for what Dynamo would make a tensor of while it traces."""
    return any(each.__module__ == "numpy" for each in type(value).__mro__)


class _Flat(torch.nn.Module):
    """A model as a function from tensors to leaves.

    Args:
        model: The model.
        form: The form of its calls.
    """

    def __init__(self, model: torch.nn.Module, form: _Form | None = None) -> None:
        super().__init__()
        self.model = model
        self.form = form

    def forward(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """Call the model."""
        assert self.form is not None
        args, kwargs = self.form.call(inputs)
        return tuple(_torch.tensors.tree_flatten(self.model(*args, **kwargs))[0])


@dataclass(frozen=True)
class _Function:
    """A compiled call.

    Attributes:
        form: The form of the call.
        returns: A result with a number in the place of each leaf.
        saved: What torch saves of the compiled function.
        run: The function that torch makes of ``saved``.
    """

    form: _Form
    returns: Any
    saved: bytes
    run: Any

    @classmethod
    def of(cls, form: _Form, returns: Any, saved: bytes) -> _Function:
        """Return the compiled call that was saved; what it needs and is missing shows now."""
        return cls(form, returns, saved, _torch.files.function_of_bytes(saved))


class Shipped:
    """The function in a file of :func:`save`. It runs without gradients.

    Args:
        model: The tensors of the model, and no code.
        functions: What the file has of each compiled call.
    """

    def __init__(self, model: torch.nn.Module, functions: Iterable[Any]) -> None:
        self._model = model
        self._functions = [
            _Function.of(_Form.of(*call)[0], returns, saved) for call, returns, saved in functions
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call.

        Raises:
            TypeError: the file has no call with such arguments, whatever the tensors are.
            RuntimeError: the file has no call with such tensors; torch says how they differ.
        """
        form, inputs = _Form.of(args, kwargs)
        fitting = [each for each in self._functions if each.form == form]
        if not fitting:
            known = ", ".join(str(each.form) for each in self._functions)
            raise TypeError(f"the file has no call {form}. It has {known}")
        with torch.inference_mode(False), torch.no_grad():
            inputs = _outside_of_inference(inputs)
            accepts = (each for each in fitting if self._accepts(each, inputs))
            function = next(accepts, fitting[-1])
            _, nested = _torch.tensors.flatten(function.returns)
            return nested(list(function.run(self._model, *inputs)))

    def add(
        self,
        model: torch.nn.Module,
        call: Call,
        dynamic: bool | None,
        options: Mapping[str, Any],
    ) -> tuple[CompileReport, ...]:
        """Compile a call, unless a graph serves it, and make it until all that it needs is kept.

        Args:
            model: The model with its code.
            call: The call.
            dynamic: As for :func:`save`.
            options: As for :func:`save`.

        Returns:
            The reports of the graphs as another process will have them.
        """
        args, kwargs = (call, {}) if isinstance(call, tuple) else ((), call)
        form, inputs = _Form.of(args, kwargs)
        if len(set(map(id, inputs))) < len(inputs):
            raise ValueError("a call has a tensor twice, and its graph would serve no other calls")
        inputs = _outside_of_inference(inputs)
        if any(each.form == form and self._accepts(each, inputs) for each in self._functions):
            return ()
        leaves, nested = _torch.tensors.flatten(model(*args, **kwargs))
        ahead: Any = torch.compile(
            _Flat(model, form).forward,
            backend="composer",
            fullgraph=True,
            dynamic=dynamic,
            options={**options, "guard_filter_fn": _guards_to_keep},
        )
        saved = _torch.files.function_as_bytes(ahead, inputs)
        self._functions.append(_Function.of(form, nested(range(len(leaves))), saved))
        # The call is made as another process makes it, so that what the file lacks shows now. That
        # builds again, from the artefacts of the first build, which Dynamo's guards are made by.
        try:
            return warm_up(self, [call]).graphs
        except AttributeError as error:
            raise ValueError(
                "the model reads a tensor that is held neither by a module nor by a list, tuple or "
                f"dict of one: {error}"
            ) from error

    def functions(self) -> list[Any]:
        """Return the argument that makes the same functions in another process."""
        tensors = itertools.repeat(torch.Tensor)
        return [(one.form.call(tensors), one.returns, one.saved) for one in self._functions]

    def _accepts(self, function: _Function, inputs: Sequence[torch.Tensor]) -> bool:
        return bool(function.run.guard_check(self._model, *inputs))


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards on the tensors of a call, and on torch's global state, which has no name."""
    return [each.name.partition("[")[0] in ("", "inputs") for each in guards]


def _outside_of_inference(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors that were made in inference mode: torch's guards refuse these."""
    return [each.clone() if each.is_inference() else each for each in inputs]


def _without_code(module: torch.nn.Module, made: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """Return plain modules with the same tensors under the same names.

    Args:
        module: The module. It may hold others in its lists and dicts, and these hold it.
        made: The plain modules that there are already, by the identity of the modules.
    """
    if id(module) in made:
        return made[id(module)]
    plain = made[id(module)] = torch.nn.Module()
    for name, value in vars(module).items():
        leaves, spec = _torch.tensors.tree_flatten(value)
        if any(isinstance(each, torch.nn.Module) for each in leaves):
            without = [
                _without_code(each, made) if isinstance(each, torch.nn.Module) else each
                for each in leaves
            ]
            vars(plain)[name] = _torch.tensors.tree_unflatten(without, spec)
        elif any(isinstance(each, torch.Tensor) for each in leaves):
            vars(plain)[name] = value
    return plain


@contextmanager
def _state_kept(model: torch.nn.Module) -> Iterator[None]:
    """Give the buffers and plain tensors of a model back as they were, since calls change them.

    What was made by the first call stays, such as a table that is computed once.
    """
    held: list[dict[str, Any]]
    held = [each for module in model.modules() for each in (vars(module), module._buffers)]
    kept = [
        (holder, name, value, value.detach().clone())
        for holder in held
        for name, value in holder.items()
        if is_plain(value)
    ]
    try:
        yield
    finally:
        for holder, name, value, copy in kept:
            now = holder.get(name)
            if isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (copy.shape, copy.dtype):
                put_back(value, copy)
                holder[name] = value


@contextmanager
def _empty_caches(folder: Path) -> Iterator[None]:
    """Let this process and its children find nothing on disk, and keep artefacts in a folder."""
    before = os.environ.get(disk.CACHE_DIR)
    os.environ[disk.CACHE_DIR] = str(folder / _COMPOSER)
    try:
        with _torch.inductor.caches_in(str(folder / _INDUCTOR)):
            yield
    finally:
        del os.environ[disk.CACHE_DIR]
        if before is not None:
            os.environ[disk.CACHE_DIR] = before


def _header(reports: Sequence[CompileReport]) -> dict[str, Any]:
    """Return what :func:`load` compares with its process."""
    devices = sorted({each.device for each in reports})
    engines = sorted({each.chosen for each in reports})
    facts = {"needs": _needs(), "made_with": _made_with(devices, engines)}
    return {"devices": devices, "engines": engines, **facts}


def _needs() -> dict[str, str]:
    """Return the versions that read what they wrote, and nothing else."""
    named = {"torch": torch.__version__, "Python": platform.python_version()}
    return {**named, distribution.NAME: distribution.version_of(distribution.NAME)}


def _made_with(devices: Iterable[str], engines: Iterable[str]) -> dict[str, str]:
    """Return what artefacts depend on. Where it differs, they may be made again."""
    facts = {"threads": str(torch.get_num_threads())}
    facts |= {f"machine for {each}": ", ".join(hardware.describe(each)) for each in devices}
    for engine in engines:
        for package in find_backend(engine).packages:
            facts[f"{package} for engine {engine}"] = distribution.version_of(package)
    return {name: text for name, text in facts.items() if text}


def _check(path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
    """Compare a header with this process.

    Raises:
        SavedFileError: the file cannot work here.
        FallbackWarning: it works, and is slower at first.
    """
    wrong = _differences(header["needs"], _needs())
    missing = (each for each in sorted(header["devices"]) if not _is_here(each))
    wrong += [f"device {each} (here: none)" for each in missing]
    if wrong:
        raise SavedFileError(
            f"{str(path)!r} cannot work here. It was saved with {'; '.join(wrong)}"
        )
    here = _made_with(header["devices"], header["engines"])
    slower = _differences(header["made_with"], here)
    if slower:
        text = f"{str(path)!r} was saved with {'; '.join(slower)}"
        warn_once(FallbackWarning(f"{text}. Engines may be built again here"), may_raise=True)


def _differences(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    texts = {
        name: f"{name} {text} (here: {here.get(name, 'none')})" for name, text in saved.items()
    }
    return [text for name, text in texts.items() if saved[name] != here.get(name)]


def _is_here(device: str) -> bool:
    """Return True if torch finds such a device: ``cuda``, ``cuda:1``."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return True
    if not hasattr(torch, kind) or not torch.get_device_module(kind).is_available():
        return False
    return int(index or 0) < int(torch.get_device_module(kind).device_count())


_DAMAGE_OF_ARCHIVES = (zipfile.BadZipFile, EOFError, NotImplementedError)
"""The errors of Python's ``zipfile``: the last is for a compression that it does not know."""

_DAMAGE_OF_HEADERS = (AttributeError, KeyError, TypeError, ValueError)
"""The errors of a header of another form."""


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say that a file is damaged, whatever shows it."""
    try:
        yield
    except (*_DAMAGE_OF_ARCHIVES, *_DAMAGE_OF_HEADERS) as error:
        text = f"{str(path)!r} is damaged, or no file of composer.save: {error_line(error)}"
        raise SavedFileError(text) from error


def _write(folder: Path, path: Path) -> None:
    """Write the files of a folder to one file: whole, or not at all."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with zipfile.ZipFile(unfinished, "w") as file:
            for each in sorted(folder.rglob("*")):
                file.write(each, each.relative_to(folder))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _add(folder: Path, cache: Path) -> None:
    """Put files into a cache that lacks them; others read it meanwhile."""
    try:
        for each in (each for each in folder.rglob("*") if each.is_file()):
            place = cache / each.relative_to(folder)
            if not place.exists():
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                unfinished = place.with_name(f"{place.stem}.{uuid.uuid4().hex}.tmp")
                try:
                    shutil.copyfile(each, unfinished)
                    unfinished.replace(place)
                finally:
                    unfinished.unlink(missing_ok=True)
    except OSError as error:
        disk.warn_of(f"the cache {str(cache)!r} cannot be written: {error}; {disk.ELSEWHERE}")
