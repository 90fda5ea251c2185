"""Hashes of a pass's source and parameters that are equal in every process for the same pass.

The source of a class is read once. vLLM read it at every compile, which took 111 ms instead of
2 ms (vllm-project/vllm#37600). A file is read once for each loading of its module, since an edit
has no effect before the module is loaded again.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch

from composer import _torch
from composer.errors import OptionError


class Unstable(Exception):
    """A value has no text that is equal in every process."""


def digest(*parts: Any) -> str:
    """Return the SHA-256 of values.

    The values may have Python's built-in types, be torch's dtypes, devices or operators, or be
    functions and classes. Containers may hold them.

    Raises:
        Unstable: A value has another type, or contains itself, as a recursive function does.
    """
    try:
        return hashlib.sha256(_text(parts).encode()).hexdigest()
    except RecursionError as endless:
        raise Unstable("it holds itself") from endless


def source_of_class(cls: type, root: type) -> str:
    """Return the source of a class and of its bases below ``root``, or bytecode without a source.

    A hash of the file of each class is included, since a pass calls functions in the same file.
    """
    return "\n".join(_source(each) + file_of(each) for each in classes_below(cls, root))


def members_of_class(cls: type, root: type) -> list[dict[str, Any]]:
    """Return the members of a class and of its bases below ``root``: attributes, functions etc.

    If a function defines a class, the same source can make classes with different members. Fields
    of a dataclass are left out, since each instance has its own values.
    """
    return [_members(each) for each in classes_below(cls, root)]


def classes_below(cls: type, root: type) -> list[type]:
    """Return the class and its bases that are subclasses of ``root``, but not ``root`` itself."""
    return [each for each in cls.__mro__ if issubclass(each, root) and each is not root]


def fields_of(thing: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Return the dataclass fields of a class or an instance; empty if it is not a dataclass."""
    return dataclasses.fields(thing) if is_dataclass(thing) else ()


def values_of(thing: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with their values; empty for any other object."""
    return {field.name: getattr(thing, field.name) for field in fields_of(thing)}


def _members(cls: type) -> dict[str, Any]:
    left_out = {"_abc_impl", *(field.name for field in fields_of(cls))}
    slots = types.MemberDescriptorType | types.GetSetDescriptorType
    members = {}
    for name, member in sorted(vars(cls).items()):
        is_special = name.startswith("__") or isinstance(member, slots)
        if name not in left_out and not is_special:
            members[name] = member
    return members


def file_of(thing: Any) -> str:
    """Return the SHA-256 of the file of a class or function; empty if it was typed in a shell."""
    return _file_of_module(sys.modules.get(getattr(thing, "__module__", "")))


def _file_of_module(module: types.ModuleType | None) -> str:
    path = getattr(module, "__file__", None) or ""
    if not Path(path).is_file():
        return ""
    return _hash_of_file(path, _Loading(getattr(module, "__spec__", None)))


@dataclass(frozen=True, eq=False, slots=True)
class _Loading:
    """One loading of a module. Two are equal only if they hold the same spec object.

    A reload makes a new spec, which may compare equal to the old one.
    """

    spec: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Loading) and self.spec is other.spec

    def __hash__(self) -> int:
        return id(self.spec)


@functools.lru_cache(maxsize=1024)
def _hash_of_file(path: str, _: _Loading) -> str:
    """Return the SHA-256 of a file as it was at the first read after this loading of its module."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def source_of_module(name: str) -> str:
    """Return the SHA-256 of a module's file. The packages around it are imported, but not itself.

    Raises:
        OptionError: There is no such module, or it has no file.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:  # its package cannot be imported
        spec = None
    path = getattr(spec, "origin", None) or ""
    if not Path(path).is_file():
        raise OptionError(f"depends_on names {name!r}, which has no source file")
    return _hash_of_file(path, _Loading(spec))


def source_not_imported(name: str) -> str:
    """Return the SHA-256 of a module's file, or an empty text if it has none.

    Neither the module nor its packages are imported.

    Args:
        name: The full name of the module.
    """
    top, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module object without a spec has this name
        return ""
    if spec is None:
        return ""
    files = [] if parts else [Path(spec.origin or "")]
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *parts)
        files += [path.with_suffix(".py"), path / "__init__.py"]
    loading = _Loading(getattr(sys.modules.get(name), "__spec__", None))
    found = [file for file in files if file.is_file()]
    return _hash_of_file(str(found[0]), loading) if found else ""


@functools.lru_cache(maxsize=1024)
def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # typed into a shell, or made by exec
        return _bytecode(thing)


def _bytecode(thing: Any) -> str:
    if not isinstance(thing, type):
        return _code_text(thing.__code__)
    text = thing.__qualname__
    for name, member in sorted(vars(thing).items()):
        function = getattr(member, "__func__", member)  # of a static or class method
        if isinstance(function, types.FunctionType):
            text += name + _code_text(function.__code__)
    return text


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


_CONSTANTS = (types.NoneType, str, bytes, bool, int, float, complex)
_TORCHS = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(_torch.operators.OpOverload, _torch.operators.OpOverloadPacket),
)
_PARTS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
}
"""Objects around functions, and the attributes that decide what they do."""


def _text(value: Any) -> str:
    for kind, text_of_kind in _TEXTS:
        if isinstance(value, kind):
            return text_of_kind(value)
    if is_dataclass(value):
        return _text(type(value)) + _text(values_of(value))
    for kind, names in _PARTS.items():
        if isinstance(value, kind):
            return _text([getattr(value, name) for name in names])
    raise Unstable(f"{type(value).__qualname__} {value!r}")


def _class_text(cls: type) -> str:
    """Return a class's name and file as text; without a file, its source, members and bases."""
    text = f"{cls.__module__}.{cls.__qualname__}{file_of(cls)}"
    if file_of(cls) or "__module__" not in vars(cls):  # built-in classes have no source
        return text
    return text + _source(cls) + _text([_members(cls), cls.__bases__])


def _builtin_text(function: types.BuiltinFunctionType) -> str:
    """Return the name of a built-in function; for a bound method also a text of its object."""
    text = f"{function.__module__}.{function.__qualname__}"
    owner = function.__self__
    if isinstance(owner, types.ModuleType | None):
        return text
    return text + _text(owner)


def _function_text(function: types.FunctionType) -> str:
    """Return a text of a function's source and file, the values in its closure, and its defaults.

    For a function without a file, the global variables that it names are included instead.
    """
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError as empty:  # a cell without a value
        raise Unstable(function.__qualname__) from empty
    file = file_of(function)
    named = {} if file else _globals_of(function, function.__code__)
    values = [cells, function.__defaults__, function.__kwdefaults__, named]
    return _source_of_function(function) + file + _text(values)


def _globals_of(function: types.FunctionType, code: types.CodeType) -> dict[str, Any]:
    scope = function.__globals__
    values = {name: scope[name] for name in sorted(code.co_names) if name in scope}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            values |= _globals_of(function, constant)
    return values


def _source_of_function(function: types.FunctionType) -> str:
    """Return a function's source, and for a lambda also its code.

    Two lambdas on one line have the same source.
    """
    source = _source(function)
    if function.__code__.co_name != "<lambda>":
        return source
    return source + _code_text(function.__code__)


_TEXTS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (_CONSTANTS, repr),
    (_TORCHS, str),
    (enum.Enum, lambda value: f"{type(value).__qualname__}.{value.name}"),
    (types.ModuleType, lambda module: f"module {module.__name__}{_file_of_module(module)}"),
    (type, _class_text),
    (Mapping, lambda table: f"{{{','.join(f'{_text(k)}:{_text(v)}' for k, v in table.items())}}}"),
    (set | frozenset, lambda values: f"{{{','.join(sorted(map(_text, values)))}}}"),
    (list | tuple, lambda values: f"({','.join(map(_text, values))})"),
    (types.BuiltinFunctionType, _builtin_text),
    (types.FunctionType, _function_text),
)
"""Kinds of values, and a function that returns the text of each. The first kind counts."""
