"""What no data reaches, such as a range or a sum over nothing, evaluated by torch itself.

Only the calls for which the engine has no faithful translation: the others are left to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from composer import _torch
from composer.graphs.nodes import attribute_at, drop_unread
from composer.lowering.views import is_dense, is_view

aten = torch.ops.aten

_MEMORY = aten.empty_permuted.default
"""What it gives is to be written to."""

_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def evaluate_constants(
    gm: torch.fx.GraphModule, is_declined: Callable[[torch.fx.Node], bool]
) -> None:
    """Replace calls that would be declined by their results, where those are always the same.

    These are calls without operands, or on literals, calls whose results have no elements, and
    calls of which every operand is such a result, or an input without elements. Shapes must be
    static.
    """
    known: dict[torch.fx.Node, Any] = {}
    for node in list(gm.graph.nodes):
        if _is_empty(node):
            known[node] = _empty(node.meta["val"])
        elif _is_literal(node):
            known[node] = attribute_at(gm, str(node.target))
        elif node.op == "call_function" and _depends_on(node, known) and node.target != _MEMORY:
            known[node] = node
        source = node.args[0] if node.target is operator.getitem else node
        if node.op == "call_function" and node in known and is_declined(source):
            _replace(gm, node, known)
    drop_unread(gm.graph)


def lift_scalars(gm: torch.fx.GraphModule) -> None:
    """Turn the numbers among the operands of float64 arithmetic into tensors of one element.

    Torchlib writes a number as float32 and widens it.
    """
    for node in list(gm.graph.nodes):
        value = node.meta.get("val")
        if node.target not in _ARITHMETIC or value.dtype is not torch.float64:
            continue
        for index, scalar in enumerate(node.args):
            if isinstance(scalar, float):
                with gm.graph.inserting_before(node):
                    lifted = _constant(
                        gm,
                        torch.tensor(scalar, dtype=torch.float64, device=value.device),
                        node,
                        index,
                    )
                lifted.meta["val"] = value.new_empty(())
                node.update_arg(index, lifted)


def _constant(
    gm: torch.fx.GraphModule, value: torch.Tensor, node: torch.fx.Node, index: int = 0
) -> torch.fx.Node:
    """A new node, where the graph is being inserted into, for a tensor that the graph holds."""
    name = f"_composer_{node.name}_{index}"
    gm.register_buffer(name, value.detach())
    return gm.graph.get_attr(name)


def _is_empty(node: torch.fx.Node) -> bool:
    """Whether the node is one tensor, whose layout is known and one of its sizes zero."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node.op not in ("placeholder", "call_function"):
        return False
    source = node.args[0] if node.target is operator.getitem else node
    has_effect = isinstance(source, torch.fx.Node) and _torch.operators.has_effect(source.target)
    if value.layout is not torch.strided or has_effect:
        return False
    known = all(isinstance(each, int) for each in (*value.shape, *value.stride()))
    return known and 0 in value.shape


def _is_literal(node: torch.fx.Node) -> bool:
    """Whether the node is a tensor written in the user's code, which is copied at every call."""
    copies = {aten.lift_fresh_copy.default, aten.lift_fresh.default}
    return node.op == "get_attr" and copies.issuperset(user.target for user in node.users)


def _empty(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _depends_on(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    """Whether the call needs nothing but what is known, and gives the same every time."""
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    is_operator = (
        isinstance(node.target, _torch.operators.OpOverload) or node.target is operator.getitem
    )
    return is_operator and not seeded and all(each in known for each in node.all_input_nodes)


def _replace(gm: torch.fx.GraphModule, node: torch.fx.Node, known: dict[Any, Any]) -> None:
    """Put the call's tensor into the graph, in place of the call."""
    value, expected = _value(node, known), node.meta.get("val")  # an assertion has none
    if not isinstance(value, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return  # its parts come later
    if value._is_zerotensor():  # a derivative that is nothing has no memory
        value = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    if any(map(_torch.symbols.is_unbacked, expected.shape)):
        return  # others of its size have the same symbol
    if (value.shape, value.dtype) != (expected.shape, expected.dtype):
        return
    if not is_dense(expected):
        return  # a copy would have no gaps
    with gm.graph.inserting_before(node):
        constant = _constant(gm, value, node)
        constant.meta["val"] = expected.clone()  # of other memory than its copy
        known[constant] = value
        if _is_returned(node):
            copy = gm.graph.call_function(aten.clone.default, (constant,))
            copy.meta.update(node.meta)
            known[copy] = value
            node.replace_all_uses_with(copy)
        else:
            node.replace_all_uses_with(constant)


def _is_returned(node: torch.fx.Node) -> bool:
    """Whether the caller is given the tensor itself or a view of it, to write to as they like."""
    users = (user for user in node.users if user.op == "output" or is_view(user))
    return any(user.op == "output" or _is_returned(user) for user in users)


def _value(node: torch.fx.Node, known: dict[Any, Any]) -> Any:
    """The node's result; torch runs what leads to it when it is first asked for."""
    if known[node] is node:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: _value(each, known))
        known[node] = node.target(*args, **kwargs)
    return known[node]
