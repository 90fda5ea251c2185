"""Makes a float64 version of a graph: the reference without eager's own rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from composer import _torch
from composer.chain.verify.runs import as_deep
from composer.graphs import clones
from composer.graphs.checkpoints import eager_forward
from composer.graphs.comparison import is_inexact
from composer.graphs.nodes import attribute_at, graph_modules, value_of
from composer.lowering.each import compile_each
from composer.passes.resolve import SharedPasses
from composer.passes.within_aotautograd import LatePasses
from composer.records import EAGER, GraphRequest

_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_METHODS = {"float", "half", "bfloat16"}

_aten = torch.ops.aten
_DRAWS = {
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like),
    *(_aten.rand, _aten.randn, _aten.rand_like, _aten.randn_like),
}
"""Operators that draw random numbers in the dtype that they are told.

From the same state, torch draws other numbers in float64 than in float32
(https://github.com/pytorch/pytorch/issues/79703, torch 2.13). So these draw in eager's dtype, and
the result is converted to float64.
"""

_DRAWS_FROM = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal"),
    *("poisson", "random", "uniform"),
}
"""Names of operators that draw in the dtype of a tensor that they are given."""


def in_double(
    request: GraphRequest, inputs: Sequence[Any], shared: SharedPasses
) -> tuple[Callable[..., Any], list[Any], GraphRequest]:
    """Return the eager graph with every floating-point dtype replaced by float64, and its inputs.

    Args:
        request: The graph; neither it nor its tensors are changed.
        inputs: Real inputs of the graph.
        shared: The passes of the later stages. They run on the graph in its own dtypes, as for
            every candidate, and their result is converted: on a float64 graph they might do
            something else.

    Returns:
        A callable, its inputs, and a request that describes them.

    Raises:
        TypeError: the graph cannot be converted.
        Exception: whatever AOTAutograd raises, if there are passes of the later stages.
    """
    gm, wide = _widened(request.gm), list(map(_wide, inputs))
    twin = dataclasses.replace(request, gm=gm, example_inputs=tuple(wide), weights=frozenset())
    forward = _forward_after_passes(request, shared) if shared.late else eager_forward(gm)
    return forward, wide, twin


def _forward_after_passes(request: GraphRequest, shared: SharedPasses) -> Callable[..., Any]:
    """Run the passes on AOTAutograd's graphs, then convert the graphs to float64.

    AOTAutograd passes the captured graph's own tensors as inputs, in their own dtypes. So float64
    conversions are added after the placeholders.
    """

    def widened_forward(functional: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        wide = _widened(functional)
        for node in wide.graph.find_nodes(op="placeholder"):
            if _is_narrow(value_of(node)):
                _widen_after(node)
        wide.recompile()
        return _torch.sources.settled_forward(wide)

    gm = clones.clone_graph(request.gm)
    passes = LatePasses(shared, EAGER)
    with _torch.modes.restored_modes():
        return compile_each(gm, request.example_inputs, passes, widened_forward)


def _widened(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    wide = clones.clone_graph(gm)
    for each in graph_modules(wide):
        for node in list(each.graph.nodes):
            _widen(each, node)
        each.recompile()
    return wide


def _widen(gm: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Make a node compute in float64.

    Raises:
        TypeError: it calls a module, or would read other bits.
    """
    if node.op == "call_module":
        raise TypeError("a module within the graph holds weights of its own")
    if _reads_bits(node):
        raise TypeError("the graph reads the bits of a number as another dtype")
    if node.op == "get_attr":
        _widen_attribute(gm, node)
        return
    # Autocast would have no effect in float64, and torch would warn of that dtype: turn it off.
    if _torch.modes.enters_autocast(node.target):
        device, dtype, _, *others = node.args
        node.args = (device, dtype, False, *others)
        return
    drawn = _drawn_in(node)
    if drawn in _NARROW:
        node.kwargs = {**node.kwargs, "dtype": drawn}  # as eager draws
        _widen_after(node)
        return
    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _wide_dtype)
    if node.op == "call_method" and node.target in _METHODS:
        node.target = "double"
    if _is_made_narrow(node):
        drawing = list(filter(_draws_from, node.users))
        for each in drawing or [node]:
            _widen_after(each)


def _reads_bits(node: torch.fx.Node) -> bool:
    """Return True for ``x.view(torch.int32)``, unless both are integers."""
    is_view = _torch.operators.operator_name(node.target) == "aten::view" or node.target == "view"
    arguments = (*node.args, *node.kwargs.values())
    dtypes = {each for each in arguments if isinstance(each, torch.dtype)}
    if not is_view or not dtypes:
        return False
    source = value_of(node.args[0]) if isinstance(node.args[0], torch.fx.Node) else None
    dtypes.add(source.dtype if isinstance(source, torch.Tensor) else torch.float32)
    return any(each.is_floating_point or each.is_complex for each in dtypes)


def _widen_attribute(gm: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    value = attribute_at(gm, str(node.target))
    if isinstance(value, torch.Tensor):
        name = f"_wide_{node.name}"
        gm.register_buffer(name, _wide(value.detach()))
        node.target = name


def _draws_from(node: torch.fx.Node) -> bool:
    """Return True if a node draws in the dtype of a tensor: ``torch.empty(8).uniform_()``."""
    name = str(getattr(node.target, "__name__", node.target))
    return name.partition(".")[0].rstrip("_") in _DRAWS_FROM


def _is_made_narrow(node: torch.fx.Node) -> bool:
    """Return True if a node without floating-point inputs has a float result: ``torch.eye(8)``."""
    if not node.op.startswith("call_") or not _is_narrow(value_of(node)):
        return False
    operands = map(value_of, node.all_input_nodes)
    return not any(isinstance(each, torch.Tensor) and is_inexact(each) for each in operands)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _NARROW


def _drawn_in(node: torch.fx.Node) -> torch.dtype | None:
    """Return the dtype of the random numbers that a node of ``_DRAWS`` makes; else ``None``."""
    if getattr(node.target, "overloadpacket", node.target) not in _DRAWS:
        return None
    return getattr(value_of(node), "dtype", None)


def _widen_after(node: torch.fx.Node) -> None:
    """Make all users of a node read its value in float64."""
    with node.graph.inserting_after(node):
        wide = node.graph.call_method("double", (node,))
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def _wide_dtype(argument: Any) -> Any:
    is_narrow = isinstance(argument, torch.dtype) and argument in _NARROW
    return torch.float64 if is_narrow else argument


def _wide(value: Any) -> Any:
    if not _is_narrow(value):
        return value
    return as_deep(value.detach().to(torch.float64).requires_grad_(value.requires_grad), value)
