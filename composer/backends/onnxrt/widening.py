"""Arithmetic on halves computed in float32, between casts, where there are no other kernels.

Torch's own kernels for the CPU do the same within: they read bfloat16, compute in float32 and round
what they write. A widened call is rounded where eager rounds, so the numbers are eager's but for
the order in which sums are added up.
"""

from __future__ import annotations

import operator
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
"""What takes a number of Python's in the dtype of the tensor; all else uses it unrounded (2.13).

``tests/lowering/test_halves.py`` asks eager for each.
"""


def widen(gm: torch.fx.GraphModule, narrow: Callable[[torch.fx.Node], Set[torch.dtype]]) -> None:
    """Have calls take float32, and round what they give to the dtype that it had.

    Args:
        gm: A functional graph, which is changed.
        narrow: Which dtypes of floating point a call shall not see; none where it stays as it is.
    """
    wide: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in list(gm.graph.nodes):
        if dtypes := narrow(node):
            _widen_operands(node, dtypes, wide)
            _widen_results(node, dtypes)


def _widen_operands(
    node: torch.fx.Node, narrow: Set[torch.dtype], wide: dict[torch.fx.Node, torch.fx.Node]
) -> None:
    numbers = _dtype_of_numbers(node, narrow)

    def widened(each: Any) -> Any:
        if isinstance(each, int | float) and not isinstance(each, bool) and numbers:
            return torch.tensor(each, dtype=numbers).item()
        if not isinstance(each, torch.fx.Node):
            return torch.float32 if each in narrow else each
        if _dtype_of(each.meta["val"]) not in narrow:
            return each
        if each not in wide:
            wide[each] = _cast(each, torch.float32)
        return wide[each]

    with node.graph.inserting_before(node):
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), widened)


def _dtype_of_numbers(node: torch.fx.Node, narrow: Set[torch.dtype]) -> torch.dtype | None:
    """What eager rounds the numbers of Python's to among a call's arguments, if it does."""
    if _torch.operators.operator_name(node.target) not in _ROUND_NUMBERS:
        return None
    computed = node.meta["val"].dtype  # one that compares has a single dtype beside its numbers
    return next(iter(narrow)) if computed in narrow | {torch.bool} else None


def _widen_results(node: torch.fx.Node, narrow: Set[torch.dtype]) -> None:
    parts = [user for user in node.users if user.target is operator.getitem]
    for each in parts or [node]:
        if _dtype_of(each.meta["val"]) in narrow:
            _round(each)

    def widened(value: Any) -> Any:
        return value.to(torch.float32) if _dtype_of(value) in narrow else value

    node.meta["val"] = map_aggregate(node.meta["val"], widened)


def _round(node: torch.fx.Node) -> None:
    """Have what reads ``node``, whose value becomes float32, read it in the dtype that it had."""
    value, readers = node.meta["val"], list(node.users)
    node.meta["val"] = value.to(torch.float32)
    with node.graph.inserting_after(node):
        rounded = _cast(node, value.dtype)
    for each in readers:
        each.replace_input_with(node, rounded)


def _cast(node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    cast = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta = node.meta | {"val": node.meta["val"].to(dtype)}
    return cast


def _dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None
