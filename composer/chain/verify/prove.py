"""Proof of work: a backend that only returns the graph it was given has compiled nothing.

Backends often give up by returning ``gm``, ``gm.forward`` or ``lambda *args: gm(*args)``. A call
would not show this, because the numbers are right; and this check must not run an engine. So the
callable is unwrapped, one layer at a time, until the graph or something unknown is found::

    partial(f) -> f          obj.method -> its function        lambda *args: g(*args) -> g

A function is unwrapped if it only passes its arguments on. Its source may be missing, so bytecode
is compared: composer writes a function that only passes on arguments of the same names, compiles it
with this interpreter, and compares the bytecode of both (:func:`_passes_on`). Invariants:

- No code of the backend is called.
- A function that does anything else, such as changing the order of its arguments, counts as work.
  So does any callable that is not written in Python.
- The check uses no instruction names, so it does not depend on the Python version.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch.fx

from composer import _torch
from composer.errors import refuse
from composer.graphs import clones
from composer.records import Reason, Status

_UNKNOWN = object()


def proven(compiled: object, original: torch.fx.GraphModule | None) -> Callable[..., Any]:
    """Return ``compiled`` if it is a callable that does more than run the unchanged graph.

    Args:
        compiled: The object that a backend returned.
        original: The graph that the backend was given. A graph that the backend changed counts as
            work. With ``None``, only the type of ``compiled`` is checked.

    Raises:
        Refusal: ``rejected`` with ``returned_original``, or with ``output_mismatch`` if
            ``compiled`` cannot be called.
    """
    if compiled is None:
        refuse(Status.REJECTED, Reason.RETURNED_ORIGINAL, "the backend returned None")
    if not callable(compiled):
        message = f"the backend returned a {type(compiled).__name__}, which cannot be called"
        refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, message)
    if original is None:
        return compiled
    for target in _passed_on_to(compiled):
        if isinstance(target, torch.fx.GraphModule) and clones.same_graph(target, original):
            message = "the backend returned the captured graph unchanged"
            refuse(Status.REJECTED, Reason.RETURNED_ORIGINAL, message)
    return compiled


def outputs_of(returned: Any) -> Any:
    """Return the outputs of an engine unchanged, if they are a tuple or a list.

    Dynamo takes outputs by index. From a single tensor it would take a row.

    Raises:
        Refusal: ``rejected`` with ``output_mismatch``, if they are neither.
    """
    if not isinstance(returned, tuple | list):
        found = "None" if returned is None else f"a {type(returned).__name__}"
        message = f"the engine returned {found}, and no tuple of the graph's outputs"
        refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, message)
    return returned


def _passed_on_to(compiled: object) -> Iterator[object]:
    """Yield the callable, then the callable that it passes its arguments on to, and so on."""
    seen: dict[int, object] = {}  # the values keep the callables alive, so that no id is reused
    while compiled is not _UNKNOWN and id(compiled) not in seen:
        yield compiled
        seen[id(compiled)] = compiled
        compiled = _next_hop(compiled)


def _next_hop(compiled: object) -> object:
    """Return the callable that this one passes its arguments on to, if it does nothing else."""
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
    """Return the callable that ``function`` calls with its own arguments, if it does nothing else.

    Args:
        function: Any object.
        owner: The object that a method belongs to. It is not passed on as an argument.
    """
    if not isinstance(function, types.FunctionType):
        return _UNKNOWN
    code = function.__code__
    path = list(code.co_names)
    if code.co_freevars:
        root, value = code.co_freevars[0], _first_free(function)
    elif owner is not _UNKNOWN:
        root, value = code.co_varnames[0], owner
    elif path:
        root = path.pop(0)
        value = function.__globals__.get(root, _UNKNOWN)
    else:
        return _UNKNOWN
    skipped = int(owner is not _UNKNOWN)
    if not _passes_on(function, ".".join((root, *path)), skipped):
        return _UNKNOWN
    for name in path:
        value = getattr(value, name, _UNKNOWN)
    return value


def _first_free(function: types.FunctionType) -> object:
    """Return the value of a function's first free variable."""
    assert function.__closure__ is not None
    try:
        return function.__closure__[0].cell_contents
    except ValueError:  # it has none yet
        return _UNKNOWN


def _passes_on(function: types.FunctionType, callee: str, skipped: int) -> bool:
    """Return True if the function calls ``callee`` with its own arguments and does nothing else.

    Args:
        function: The function to look at. It is not called.
        callee: A variable, or an attribute of one: ``self.gm.forward``.
        skipped: How many of the first arguments are not passed on.
    """
    code = function.__code__
    taken = inspect.signature(types.FunctionType(code, {}, closure=function.__closure__))
    passed = [_PASSED[each.kind].format(each.name) for each in taken.parameters.values()]
    call = f"{callee}({', '.join(passed[skipped:])})"
    variable = (code.co_varnames or ("result",))[-1]
    directly = _is_same(code, f"def run{taken}: return {call}")
    return directly or _is_same(code, f"def run{taken}: {variable} = {call}; return {variable}")


_PASSED = {
    inspect.Parameter.POSITIONAL_ONLY: "{0}",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "{0}",
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}


def _is_same(code: types.CodeType, source: str) -> bool:
    """Return True if ``source``, nested in a function with those free variables, compiles to it."""
    around = f"def around({', '.join(code.co_freevars)}):\n  {source}"
    try:
        pattern = compile(around, "<pattern>", "exec", dont_inherit=True)
    except SyntaxError:  # Python generated a variable name that cannot be written in source
        return False
    for _ in ("around", "run"):
        pattern = next(each for each in pattern.co_consts if isinstance(each, types.CodeType))
    return pattern.co_code == code.co_code and _keywords(pattern) == _keywords(code)


def _keywords(code: types.CodeType) -> list[tuple[object, ...]]:
    """Return the tuples among the constants: keyword names by which arguments are passed on."""
    return [each for each in code.co_consts if isinstance(each, tuple)]
