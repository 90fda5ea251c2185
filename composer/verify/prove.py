"""Did the engine do anything? What a backend returned, held against the graph it was given."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch.fx

from composer import _torch
from composer.errors import refuse
from composer.graphs import clones
from composer.records import Reason, Status

_SILENT = frozenset(
    {"RESUME", "COPY_FREE_VARS", "MAKE_CELL", "PUSH_NULL", "PRECALL", "CACHE", "NOP"}
    | {"EXTENDED_ARG", "NOT_TAKEN"}
)
_CALL = frozenset({"CALL", "CALL_FUNCTION_EX"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_MOVES = frozenset(
    {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "STORE_FAST"}
    | {"LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST_LOAD_FAST", "BUILD_LIST", "BUILD_TUPLE"}
    | {"BUILD_MAP", "LIST_EXTEND", "LIST_TO_TUPLE", "DICT_MERGE", "CALL_INTRINSIC_1"}
    | {"RETURN_VALUE"}
)
_UNKNOWN = object()


def proven(compiled: object, original: torch.fx.GraphModule | None) -> Callable[..., Any]:
    """``compiled``, if it is a callable that does more than run the untouched ``original``.

    Caught are ``None``, the module itself, its bound ``forward``, and wrappers, partials and
    functions that only pass their arguments on to one of these. A graph that the backend changed
    counts as its work. ``None`` for ``original`` asks only for a callable.

    Raises:
        Refusal: ``rejected`` with ``returned_original``, or with ``output_mismatch`` for what
            cannot be called.
    """
    if compiled is None:
        refuse(Status.REJECTED, Reason.RETURNED_ORIGINAL, "the backend returned None")
    if not callable(compiled):
        what = f"the backend returned a {type(compiled).__name__}, which cannot be called"
        refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, what)
    if original is None:
        return compiled
    for target in _passed_on_to(compiled):
        if isinstance(target, torch.fx.GraphModule) and clones.same_graph(target, original):
            what = "the backend returned the captured graph unchanged"
            refuse(Status.REJECTED, Reason.RETURNED_ORIGINAL, what)
    return compiled


def outputs_of(returned: Any) -> Any:
    """What an engine returned, if it is a tuple or a list, as a graph returns.

    Dynamo takes the outputs out by their numbers: of a tensor by itself it would take a row.

    Raises:
        Refusal: ``rejected`` with ``output_mismatch``, where it is neither.
    """
    if not isinstance(returned, tuple | list):
        found = "None" if returned is None else f"a {type(returned).__name__}"
        what = f"the engine returned {found}, and no tuple of the graph's outputs"
        refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, what)
    return returned


def _passed_on_to(compiled: object) -> Iterator[object]:
    """The callable, then what it does nothing but call, what that does nothing but call, ..."""
    seen: list[object] = []
    while compiled is not _UNKNOWN and not any(compiled is each for each in seen):
        yield compiled
        seen.append(compiled)
        compiled = _next_hop(compiled)


def _next_hop(compiled: object) -> object:
    unwrapped = _torch.breaks.undisabled(compiled)
    if unwrapped is not compiled:
        return unwrapped
    if isinstance(compiled, torch.nn.Module | type):
        return _UNKNOWN
    if isinstance(compiled, functools.partial):
        return _UNKNOWN if compiled.args or compiled.keywords else compiled.func
    if isinstance(compiled, types.MethodType):
        owner = compiled.__self__
        if isinstance(owner, torch.fx.GraphModule) and compiled.__name__ in _RUNS_THE_GRAPH:
            return owner
        return _callee(compiled.__func__, owner)
    if isinstance(compiled, types.FunctionType):
        return _callee(compiled)
    method = getattr(type(compiled), "__call__", None)  # noqa: B004  # the method is wanted
    return _callee(method, compiled)


_RUNS_THE_GRAPH = frozenset({"forward", "_lazy_forward", "__call__", "call_wrapped"})


def _callee(function: object, owner: object = _UNKNOWN) -> object:
    """What ``function`` calls, if that call with its own arguments is all its code does."""
    if not isinstance(function, types.FunctionType):
        return _UNKNOWN
    code = [each for each in dis.get_instructions(function) if each.opname not in _SILENT]
    head, rest = code[0], code[1:]
    called = _loaded(head, function, owner)
    while called is not _UNKNOWN and rest and rest[0].opname in _ATTRIBUTE:
        called = getattr(called, rest.pop(0).argval, _UNKNOWN)
    operations = [each.opname for each in rest]
    one_call = sum(name in _CALL for name in operations) == 1
    return called if one_call and set(operations) <= _CALL | _MOVES else _UNKNOWN


def _loaded(head: dis.Instruction, function: types.FunctionType, owner: object) -> object:
    """The value that a function's first instruction loads; methods load their owner first."""
    name = head.argval
    if head.opname == "LOAD_DEREF":
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        try:
            return cells[name].cell_contents if name in cells else _UNKNOWN
        except ValueError:  # the cell is still empty
            return _UNKNOWN
    if head.opname == "LOAD_GLOBAL":
        return function.__globals__.get(name, _UNKNOWN)
    is_owner = head.opname.startswith("LOAD_FAST") and name == function.__code__.co_varnames[0]
    return owner if is_owner else _UNKNOWN
