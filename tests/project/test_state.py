"""What changes after import, and how many parameters a function has: both are counted."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

import composer
from composer.system import forks

PACKAGE = Path(composer.__file__).parent
FILES = [each for each in sorted(PACKAGE.rglob("*.py")) if each.name != "__main__.py"]

STATE = {
    "composer._importing": "torch cannot be imported by several threads at once (2.13)",
    "composer.backends.tensorrt.place._one_records": "one CUDA graph is recorded at a time",
    "composer.system.subprocesses.servers.servers": "the servers that fork child processes",
    "composer.system.forks._steps": "what a forked child does with locks, engines and sinks",
    "composer.lowering.weights.by_address._bound": "composer.refresh reaches every engine",
    "composer.passes.resolve.PASSES": "passes that the program registers",
    "composer.session._current": "all else that this process remembers",
    "composer.system.warned._given": "warnings that are given once",
}
"""What changes after import, and why. Nothing is to be added here.

A table that nothing writes to does not count, nor does a cache by ``functools``: all are of
functions that give the same answer each time, or that patch torch once.
"""

COMPLETE_AFTER_IMPORT = {"composer._torch.names.FEATURES"}
"""Tables that decorators fill while modules are imported."""

ALWAYS = (WeakKeyDictionary, WeakSet, WeakValueDictionary, type(forks.lock()))
TABLES = (dict, list, set, deque, OrderedDict, bytearray)
WRITES = frozenset(
    [
        *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend"),
        *("insert", "intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove"),
        *("setdefault", "update"),
    ]
)


def module_of(path: Path) -> types.ModuleType:
    parts = ["composer", *path.relative_to(PACKAGE).with_suffix("").parts]
    return importlib.import_module(".".join(parts).removesuffix(".__init__"))


def assigned(tree: ast.Module) -> set[str]:
    """The names that a module assigns at its top."""
    targets = [
        target
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return {each.id for top in targets for each in ast.walk(top) if isinstance(each, ast.Name)}


def written(tree: ast.Module) -> set[str]:
    """The last names of what functions of a module write to in place."""
    found: set[str] = set()
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))
    for node in (each for function in functions for each in ast.walk(function)):
        owner: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value if node.func.attr in WRITES else None
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            owner = node.value
        elif isinstance(node, ast.AugAssign):
            owner = node.target
        if isinstance(owner, ast.Name | ast.Attribute):
            found.add(owner.id if isinstance(owner, ast.Name) else owner.attr)
    return found


def declared_global(tree: ast.Module) -> set[str]:
    """The names that functions of a module bind anew."""
    declarations = (each for each in ast.walk(tree) if isinstance(each, ast.Global))
    return {name for each in declarations for name in each.names}


def is_state(value: Any, *, is_written: bool) -> bool:
    """Whether a value changes: objects of composer's are taken to, unless they are frozen."""
    if isinstance(value, ALWAYS):
        return True
    kind = type(value)
    if isinstance(value, TABLES):
        return is_written
    if not kind.__module__.startswith("composer."):
        return False
    if not dataclasses.is_dataclass(kind):
        return bool(getattr(value, "__dict__", ())) and not isinstance(value, str | int | tuple)
    frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]  # typed as any dataclass
    return not frozen or any(each.default_factory in TABLES for each in dataclasses.fields(value))


def held_by_classes(module: types.ModuleType) -> Iterator[str]:
    """Tables and locks among the attributes of the classes that a module defines."""
    for name, cls in vars(module).items():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            for attribute, value in vars(cls).items():
                if isinstance(value, (*ALWAYS, *TABLES)) and not attribute.startswith(("_", "mod")):
                    yield f"{module.__name__}.{name}.{attribute}"


def test_state_is_what_is_listed() -> None:
    """It is told by the type of each value, and by what the code writes to."""
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    public = {name for tree in trees.values() for name in written(tree)}
    found = set()
    for path, tree in trees.items():
        module, here = module_of(path), written(tree)
        found |= {f"{module.__name__}.{name}" for name in declared_global(tree)}
        for name in assigned(tree) & vars(module).keys():
            is_written = name in (here if name.startswith("_") else public)
            if is_state(vars(module)[name], is_written=is_written):
                found.add(f"{module.__name__}.{name}")
    assert sorted(found - COMPLETE_AFTER_IMPORT) == sorted(STATE)


def test_no_class_holds_state_for_all_its_objects() -> None:
    """Such a table would be state of the process by another name."""
    assert [each for path in FILES for each in held_by_classes(module_of(path))] == []


MOST_PARAMETERS = 8
OF_ATEN = {
    "attention_backward": "_scaled_dot_product_flash_attention_for_cpu_backward",
    "cudnn_attention": "_scaled_dot_product_cudnn_attention",
    "encoder_layer": "_transformer_encoder_layer_fwd",
    "self_attention": "_native_multi_head_attention",
    "convolution_backward": "convolution_backward",
    "far_padded": "convolution",
}
"""Decompositions, which torch calls with the arguments of the operator: these have more."""

COMMANDS = {"lock"}
"""Functions of a command, which only typer calls: their parameters are its options."""


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [each for each in names if each not in ("self", "cls")]


def test_functions_have_few_parameters() -> None:
    """A caller can read a call of them without a look at the function."""
    many = {
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(parameters(node)) > MOST_PARAMETERS
    }
    assert many == OF_ATEN.keys() | COMMANDS


def test_those_with_more_have_the_parameters_of_their_operator() -> None:
    """So there is nothing to be had from an object that would hold them."""
    defined = {
        node.name: len(parameters(node))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in OF_ATEN
    }
    schemas = {name: getattr(torch.ops.aten, op).default._schema for name, op in OF_ATEN.items()}
    assert defined == {name: len(each.arguments) for name, each in schemas.items()}
