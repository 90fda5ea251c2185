"""Evaluates constant calls, such as a range or a sum of an empty tensor, with torch itself.

This is done only for calls that the engine would decline. The engine evaluates the others.
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
"""Not evaluated, since its result is memory that is written to later."""

_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def evaluate_constants(
    gm: torch.fx.GraphModule, is_declined: Callable[[torch.fx.Node], bool]
) -> None:
    """Replace declined calls by their results, where the result is always the same.

    The result is always the same if the call has no operands, if it has no elements, or if every
    operand is a literal, such a result, or an input without elements. Shapes must be static.

    Args:
        gm: The graph. It is changed.
        is_declined: Returns True if the engine would not take the call.
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
    """Turn scalar operands of float64 arithmetic into float64 tensors of one element.

    Torchlib writes a scalar as float32 and widens it, which would round it.
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
    """Register a tensor in the graph module, and return a new node for it.

    The node is inserted at the graph's current insertion point.
    """
    name = f"_composer_{node.name}_{index}"
    gm.register_buffer(name, value.detach())
    return gm.graph.get_attr(name)


def _is_empty(node: torch.fx.Node) -> bool:
    """True if the node is one strided tensor without elements, of static sizes and strides."""
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
    """True if the node is a tensor literal of the user's code, which is copied at every call."""
    copies = {aten.lift_fresh_copy.default, aten.lift_fresh.default}
    return node.op == "get_attr" and copies.issuperset(user.target for user in node.users)


def _empty(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _depends_on(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    """True if all operands are known constants, and the call is deterministic."""
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    is_operator = (
        isinstance(node.target, _torch.operators.OpOverload) or node.target is operator.getitem
    )
    return is_operator and not seeded and all(each in known for each in node.all_input_nodes)


def _replace(gm: torch.fx.GraphModule, node: torch.fx.Node, known: dict[Any, Any]) -> None:
    """Replace the call by a constant that holds its result."""
    value, expected = _value(node, known), node.meta.get("val")  # an assertion has no "val"
    if not isinstance(value, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return  # a tuple's tensors are replaced at their getitem nodes
    if value._is_zerotensor():  # a derivative that is zero has no memory
        value = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    if any(map(_torch.symbols.is_unbacked, expected.shape)):
        return  # other tensors have a size of the same symbol
    if (value.shape, value.dtype) != (expected.shape, expected.dtype):
        return
    if not is_dense(expected):
        return  # a copy would not have the same gaps
    with gm.graph.inserting_before(node):
        constant = _constant(gm, value, node)
        constant.meta["val"] = expected.clone()  # memory other than that of its copy
        known[constant] = value
        if _is_returned(node):
            copy = gm.graph.call_function(aten.clone.default, (constant,))
            copy.meta.update(node.meta)
            known[copy] = value
            node.replace_all_uses_with(copy)
        else:
            node.replace_all_uses_with(constant)


def _is_returned(node: torch.fx.Node) -> bool:
    """True if the tensor or a view of it is returned: the caller may then write to it."""
    users = (user for user in node.users if user.op == "output" or is_view(user))
    return any(user.op == "output" or _is_returned(user) for user in users)


def _value(node: torch.fx.Node, known: dict[Any, Any]) -> Any:
    """Return the node's result. At the first request, torch runs the calls that lead to it."""
    if known[node] is node:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: _value(each, known))
        known[node] = node.target(*args, **kwargs)
    return known[node]
