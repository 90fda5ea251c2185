"""Runs half-precision calls for which ONNX Runtime has no kernel in float32, with casts around.

Torch's own kernels for the CPU do the same inside: they read bfloat16, compute in float32 and round
the result. A widened call is rounded at the same places as in eager. So its results equal those of
eager, except for the order in which sums are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from composer import _torch

aten = torch.ops.aten

_ROUND_NUMBERS = frozenset(
    {"aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge", "aten::hardshrink"}
    | {"aten::add", "aten::sub", "aten::rsub", "aten::remainder", "aten::fmod", "aten::pow"}
)
"""Operators that round a Python number to the dtype of the tensor. Others do not (torch 2.13).

``tests/lowering/test_halves.py`` compares each with eager.
"""


def widen(
    gm: torch.fx.GraphModule, narrow_dtypes_of: Callable[[torch.fx.Node], Set[torch.dtype]]
) -> None:
    """Insert casts so that calls get float32, and their results have the same dtype as before.

    ``narrow_dtypes_of`` returns the floating-point dtypes of a call that float32 replaces.
    """
    wide: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in list(gm.graph.nodes):
        narrow = narrow_dtypes_of(node)
        if narrow:
            _widen_operands(node, narrow, wide)
            _widen_results(node, narrow)


def _widen_operands(
    node: torch.fx.Node, narrow: Set[torch.dtype], wide: dict[torch.fx.Node, torch.fx.Node]
) -> None:
    """Replace the operands of a call by float32, and round its Python numbers as eager does.

    ``wide`` has the casts made so far, by the node that they cast. New ones are added.
    """
    rounding = _dtype_of_numbers(node, narrow)

    def widened(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return cast_of(value)
        if rounding is not None and type(value) in (int, float):
            return torch.tensor(value, dtype=rounding).item()
        return torch.float32 if value in narrow else value  # an argument may be a dtype

    def cast_of(source: torch.fx.Node) -> torch.fx.Node:
        if getattr(source.meta["val"], "dtype", None) not in narrow:
            return source
        if source not in wide:
            wide[source] = cast(source, torch.float32)
        return wide[source]

    with node.graph.inserting_before(node):
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), widened)


def _dtype_of_numbers(node: torch.fx.Node, narrow: Set[torch.dtype]) -> torch.dtype | None:
    """The dtype that eager rounds a call's Python numbers to; ``None`` if it does not round."""
    if _torch.operators.operator_name(node.target) not in _ROUND_NUMBERS:
        return None
    computed = node.meta["val"].dtype
    if computed is not torch.bool and computed not in narrow:
        return None
    return next(iter(narrow))  # the only one: a tensor and a number have no other narrow dtype


def _widen_results(node: torch.fx.Node, narrow: Set[torch.dtype]) -> None:
    """Make the results of a call float32, and cast them back for their users."""
    for result in _torch.operators.results_of(node):
        if getattr(result.meta["val"], "dtype", None) in narrow:
            _round(result)

    def widened(value: Any) -> Any:
        return value.to(torch.float32) if getattr(value, "dtype", None) in narrow else value

    node.meta["val"] = map_aggregate(node.meta["val"], widened)


def _round(node: torch.fx.Node) -> None:
    """Make the value of ``node`` float32, and give its users a cast to the dtype it had before."""
    value, users = node.meta["val"], list(node.users)
    node.meta["val"] = value.to(torch.float32)
    with node.graph.inserting_after(node):
        rounded = cast(node, value.dtype)
    for user in users:
        user.replace_input_with(node, rounded)


def cast(node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    """Insert a cast of a node's value; a value that has the dtype already is returned itself."""
    value = node.meta["val"]
    if value.dtype is dtype:
        return node
    result = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    result.meta = node.meta | {"val": value.to(dtype)}
    return result
