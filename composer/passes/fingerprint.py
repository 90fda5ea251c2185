"""Text that is equal in every process for the same pass: its source and its parameters.

The source of a class is read once; reading it at every compile is what made custom passes cost
vLLM 111 ms instead of 2 (vllm-project/vllm#37600).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer import _torch
from composer.errors import OptionError


class Unstable(Exception):
    """A value has no text that would be equal in another process."""


def digest(*parts: Any) -> str:
    """SHA-256 of values of Python's own types, torch's dtypes, devices and operators, functions.

    Raises:
        Unstable: one of them is something else, or holds itself, as a recursive function does.
    """
    try:
        return hashlib.sha256(_text(parts).encode()).hexdigest()
    except RecursionError as endless:
        raise Unstable("it holds itself") from endless


@functools.cache
def source_of_class(cls: type, root: type) -> str:
    """The source of a class and of its bases up to ``root``; its bytecode where there is none.

    With it goes the file that each stands in, since a pass calls functions beside it.
    """
    own = [each for each in cls.__mro__ if issubclass(each, root) and each is not root]
    return "\n".join(_source(each) + file_of(each) for each in own)


def file_of(thing: Any) -> str:
    """SHA-256 of the file of a class or function; nothing where it was typed into a shell."""
    path = getattr(sys.modules.get(getattr(thing, "__module__", "")), "__file__", None)
    return _hash_of_file(path) if path and Path(path).is_file() else ""


@functools.cache
def _hash_of_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@functools.cache
def source_of_module(name: str) -> str:
    """SHA-256 of a module's file, without importing the module itself.

    Raises:
        OptionError: there is no such module, or it has no file.
    """
    try:
        found = importlib.util.find_spec(name)
    except ImportError:  # of the package that it should be in
        found = None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise OptionError(f"depends_on names {name!r}, which has no source file")
    return _hash_of_file(found.origin)


def source_not_imported(name: str) -> str:
    """SHA-256 of a module's file, importing nothing, its packages neither; empty without a file.

    Args:
        name: Of the module, in full.
    """
    top, *parts = name.split(".")
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module of this name was made by hand
        return ""
    places = (found.submodule_search_locations or ()) if found and parts else ()
    files = [Path(place, *parts) for place in places]
    files = [file for each in files for file in (each.with_suffix(".py"), each / "__init__.py")]
    if found and found.origin and not parts:
        files = [Path(found.origin)]
    return next((_hash_of_file(str(each)) for each in files if each.is_file()), "")


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # typed into a shell, or made by exec
        return _bytecode(thing)


def _bytecode(thing: Any) -> str:
    if isinstance(thing, type):
        # Static and class methods hold the function that they call.
        members = [(n, getattr(m, "__func__", m)) for n, m in sorted(vars(thing).items())]
        functions = (each for each in members if isinstance(each[1], types.FunctionType))
        return thing.__qualname__ + "".join(f"{n}{_bytecode(f)}" for n, f in functions)
    return _code_text(thing.__code__)


def _code_text(code: types.CodeType) -> str:
    constants = _constant_text(code.co_consts)
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {constants}"


def _constant_text(constant: Any) -> str:
    if isinstance(constant, types.CodeType):
        return _code_text(constant)
    if isinstance(constant, tuple):
        return f"({', '.join(map(_constant_text, constant))})"
    if isinstance(constant, frozenset):  # whose order differs from process to process
        return f"{{{', '.join(sorted(map(_constant_text, constant)))}}}"
    return repr(constant)


def _text(value: Any) -> str:
    if value is None or isinstance(value, str | bytes | bool | int | float | complex):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, _torch.OpOverload):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_text(k)}:{_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(map(_text, value))) + "}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(map(_text, value)) + ")"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return _text(type(value)) + _text(fields)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}{file_of(value)}"
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__  # the module, or the object whose method it is
        named = f"{value.__module__}.{value.__qualname__}"
        return named if isinstance(owner, types.ModuleType | None) else named + _text(owner)
    if isinstance(value, types.FunctionType):
        return _function_text(value)
    if isinstance(value, functools.partial):
        return _text([value.func, value.args, value.keywords])
    raise Unstable(f"{type(value).__qualname__} {value!r}")


def _function_text(function: types.FunctionType) -> str:
    """A function's source and file, with the values that it closes over and its defaults."""
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError as empty:  # a cell that is still to be filled
        raise Unstable(function.__qualname__) from empty
    return _source_of_function(function) + _text(
        [cells, function.__defaults__, function.__kwdefaults__]
    )


@functools.lru_cache(maxsize=1024)
def _source_of_function(function: types.FunctionType) -> str:
    """With what stands beside it in its file; another lambda may stand on a lambda's own line."""
    code = function.__code__
    told_apart = _code_text(code) if code.co_name == "<lambda>" else ""
    return _source(function) + told_apart + file_of(function)
