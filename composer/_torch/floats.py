"""Python floats that Dynamo made inputs of a graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from composer._torch.names import optional

_COMMUTATIVE = (operator.add, operator.mul, torch.add, torch.mul, torch.multiply)
_DIVISIONS = (operator.truediv, torch.div, torch.divide, torch.true_divide)
_COMPARISONS = (
    *(operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne),
    *(torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne),
)
_IN_PLACE = (operator.iadd, operator.imul, operator.isub, operator.itruediv)
_ANYWHERE = (*_COMMUTATIVE, *_DIVISIONS, *_COMPARISONS, *_IN_PLACE)
_SUBTRACTIONS = (operator.sub, torch.sub, torch.subtract)
_WORDS = ("add", "mul", "sub", "div", "multiply", "subtract", "divide", "true_divide")
_METHODS = (*_WORDS, *(f"{each}_" for each in _WORDS), "gt", "ge", "lt", "le", "eq", "ne")
"""What AOTAutograd computes with a tensor in place of a float. It specializes floats that meet any
other call, also one that is subtracted from (``torch/fx/passes/_tensorify_python_scalars.py``,
torch 2.13)."""


_CHOOSING = "choosing in the background for graphs that take Python floats"
_NAMES = (
    "torch._dynamo.symbolic_convert:TensorifyState",
    "torch._dynamo.exc:TensorifyScalarRestartAnalysis",
    "torch._guards:CompileContext",
    *(f"torch.utils._sympy.symbol:{each}" for each in ("SymT", "symbol_is_type")),
)


@optional(_CHOOSING, *_NAMES)
def specialize_floats(gm: torch.fx.GraphModule) -> None:
    """Have Dynamo capture the graph anew, if it takes floats that can be no tensors.

    In the new capture they are constants, with guards. AOTAutograd asks for the same, but it can
    only do so while Dynamo compiles, and not in a child process.

    Raises:
        TensorifyScalarRestartAnalysis: the graph takes such floats. Dynamo starts anew.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._guards import CompileContext

    if CompileContext.try_get() is None:
        return
    met = set[str]().union(*(_symbols(node) for node in gm.graph.nodes if not _takes_tensors(node)))
    new = [name for name in met if not TensorifyState.should_specialize(name)]
    for name in new:
        TensorifyState.specialize(name)
    if new:
        raise TensorifyScalarRestartAnalysis


@optional(_CHOOSING, *_NAMES, without=lambda gm: contextlib.nullcontext())
@contextlib.contextmanager
def without_restart(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Within, AOTAutograd does not look for floats that the graph no longer takes.

    Dynamo made them constants, with guards, when it captured the graph anew. Outside of Dynamo's
    compile their symbols look like floats that could not be replaced by tensors, for which Dynamo
    would have to start anew. It still has to for those that the graph does take: nothing else would
    guard their values.
    """
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._guards import CompileContext

    gone = set[str]() if CompileContext.try_get() else _floats_known_to(gm) - _floats_taken_by(gm)
    new = {name for name in gone if not TensorifyState.should_specialize(name)}
    for name in new:
        TensorifyState.specialize(name)
    try:
        yield
    finally:
        TensorifyState.force_specializations.difference_update(new)


def _floats_taken_by(gm: torch.fx.GraphModule) -> set[str]:
    """Return the names of the symbols of floats that are inputs of the graph."""
    fakes = map(_fake_of, gm.graph.find_nodes(op="placeholder"))
    return set[str]().union(*(_names_in(getattr(each, "item_memo", None)) for each in fakes))


def _fake_of(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _floats_known_to(gm: torch.fx.GraphModule) -> set[str]:
    """Return the names of all symbols that stood for floats when Dynamo captured the graph."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    names: set[str] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        env = getattr(getattr(_fake_of(node), "fake_mode", None), "shape_env", None)
        known = getattr(env, "backed_var_to_val", {})
        names |= {each.name for each in known if symbol_is_type(each, SymT.FLOAT)}
    return names


def _symbols(node: torch.fx.Node) -> set[str]:
    """Return the names of the symbols in the floats that a node takes."""
    values = (each.meta.get("example_value") for each in node.all_input_nodes)
    return set[str]().union(*map(_names_in, values))


def _names_in(value: object) -> set[str]:
    """Return the names of the symbols of inputs in a float; none for any other value."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    if not isinstance(value, torch.SymFloat):
        return set()
    symbols = value.node._expr.free_symbols
    return {each.name for each in symbols if symbol_is_type(each, SymT.FLOAT)}


def _takes_tensors(node: torch.fx.Node) -> bool:
    """True if a node computes the same with a tensor in place of a float.

    A node whose result is a float itself counts as one. The nodes that read its result decide.
    """
    if isinstance(node.meta.get("example_value"), torch.SymFloat | torch.SymBool):
        return True
    if node.target in _SUBTRACTIONS:
        first: Any = node.args[0]
        is_float = isinstance(first, torch.fx.Node) and _names_in(first.meta.get("example_value"))
        return not node.kwargs and not is_float
    known = {"call_method": _METHODS, "call_function": _ANYWHERE}.get(node.op, ())
    return not node.kwargs and node.target in known
