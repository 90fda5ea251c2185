"""Python floats that Dynamo made inputs of a graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

import torch
import torch.fx

from composer._torch.names import optional

_OPERATORS = (operator.add, operator.mul, operator.sub, operator.truediv)
_COMPARISONS = (
    *(operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne),
    *(torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne),
)
_TAKE_TENSORS = (*_OPERATORS, torch.add, torch.mul, torch.sub, torch.div, *_COMPARISONS)
_METHODS = ("add", "mul", "sub", "div", "add_", "mul_", "sub_", "div_")
"""What AOTAutograd computes with a tensor in place of a float. It specializes floats that meet any
other call (``torch/fx/passes/_tensorify_python_scalars.py``, torch 2.13)."""


@optional(
    "choosing in the background for graphs that take Python floats",
    "torch._dynamo.symbolic_convert:TensorifyState",
    "torch._dynamo.exc:TensorifyScalarRestartAnalysis",
    "torch._guards:CompileContext",
)
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


@optional(
    "choosing in the background for graphs that take Python floats",
    "torch._dynamo.symbolic_convert:TensorifyState",
    "torch._guards:CompileContext",
    *(f"torch.utils._sympy.symbol:{each}" for each in ("SymT", "symbol_is_type")),
    without=lambda gm: contextlib.nullcontext(),
)
@contextlib.contextmanager
def without_restart(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Within, AOTAutograd takes the floats of a graph as tensors, and does not ask Dynamo for more.

    Outside of Dynamo's compile it reads each float from its tensor. It takes the symbol that stood
    for the float before as one that it could not replace, and would have Dynamo start anew.
    """
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._guards import CompileContext

    names = set[str]() if CompileContext.try_get() else _floats_known_to(gm)
    for name in names:
        TensorifyState.specialize(name)
    try:
        yield
    finally:
        TensorifyState.force_specializations.difference_update(names)


def _floats_known_to(gm: torch.fx.GraphModule) -> set[str]:
    """Return the names of all symbols that stood for floats when Dynamo captured the graph."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    names: set[str] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        fake = node.meta.get("example_value", node.meta.get("val"))
        env = getattr(getattr(fake, "fake_mode", None), "shape_env", None)
        known = getattr(env, "backed_var_to_val", {})
        names |= {each.name for each in known if symbol_is_type(each, SymT.FLOAT)}
    return names


def _symbols(node: torch.fx.Node) -> set[str]:
    """Return the names of the symbols in the floats that a node takes."""
    names: set[str] = set()
    for value in (each.meta.get("example_value") for each in node.all_input_nodes):
        if isinstance(value, torch.SymFloat):
            names |= {symbol.name for symbol in value.node._expr.free_symbols}
    return names


def _takes_tensors(node: torch.fx.Node) -> bool:
    """True if a node computes the same with a tensor in place of a float."""
    known = {"call_method": _METHODS, "call_function": _TAKE_TENSORS}.get(node.op, ())
    return not node.kwargs and node.target in known
