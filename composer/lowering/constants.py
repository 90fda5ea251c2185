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
from composer.graphs.nodes import are_static, attribute_at, call_behind, drop_unread
from composer.lowering.views import has_memory, is_dense, is_returned

aten = torch.ops.aten

_DETERMINISTIC = ("aten", "prims", "quantized_decomposed", "composer")
"""Namespaces of operators whose results depend on their operands alone, but for those that draw."""

_MEMORY = aten.empty_permuted.default
"""Not evaluated, since its result is memory that is written to later."""


def evaluate_constants(
    gm: torch.fx.GraphModule, is_declined: Callable[[torch.fx.Node], bool]
) -> None:
    """Replace the calls that an engine declines by their results, where these are always the same.

    A result is always the same if the call has no operands, if it has no elements, or if every
    operand is a literal, such a result, or an input without elements. Shapes must be static.
    """
    literals = filter(_is_literal, gm.graph.find_nodes(op="get_attr"))
    known: dict[torch.fx.Node, Any] = {
        node: attribute_at(gm, str(node.target)) for node in literals
    }
    for node in list(gm.graph.nodes):
        if _is_empty(node):
            known[node] = _empty(node.meta["val"])
        elif _is_computed_from(node, known):
            known[node] = node
        is_known_call = node.op == "call_function" and node in known
        if is_known_call and is_declined(call_behind(node)):
            _replace(gm, node, known)
    drop_unread(gm.graph)


def lift_scalars(gm: torch.fx.GraphModule) -> None:
    """Turn scalar operands of float64 arithmetic into float64 tensors of one element.

    Torchlib writes a scalar as float32 and widens it, which would round it.
    """
    targets = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
    for target in targets:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            if node.meta["val"].dtype is torch.float64:
                _lift_scalars_of(gm, node)


def _lift_scalars_of(gm: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    result = node.meta["val"]
    for index, scalar in enumerate(node.args):
        if not isinstance(scalar, float):
            continue
        tensor = torch.tensor(scalar, dtype=torch.float64, device=result.device)
        with gm.graph.inserting_before(node):
            lifted = _constant(gm, tensor, node, index)
        lifted.meta["val"] = result.new_empty(())
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
    if not has_memory(node) or node.op not in ("placeholder", "call_function"):
        return False
    value = node.meta["val"]
    if not are_static((*value.shape, *value.stride())):
        return False  # before a question that would add a guard
    return 0 in value.shape and not _torch.operators.has_effect(call_behind(node).target)


def _is_literal(node: torch.fx.Node) -> bool:
    """True if a constant is a tensor literal of the user's code, which is copied at every call."""
    copies = {aten.lift_fresh_copy.default, aten.lift_fresh.default}
    return copies.issuperset(user.target for user in node.users)


def _empty(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _is_computed_from(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    """True if a node is a deterministic call whose operands are all known constants.

    Only torch's own operators are known to be deterministic. Others may draw numbers, read a
    counter, or wait for other ranks.
    """
    is_operator = isinstance(node.target, _torch.operators.OpOverload)
    is_torchs = _torch.operators.operator_namespace(node.target) in _DETERMINISTIC
    if not (is_operator and is_torchs) and node.target is not operator.getitem:
        return False
    if node.target is _MEMORY or _torch.operators.draws(node.target):
        return False
    return known.keys() >= {*node.all_input_nodes}


def _replace(gm: torch.fx.GraphModule, node: torch.fx.Node, known: dict[Any, Any]) -> None:
    """Replace the call by a constant that holds its result."""
    value = _value(node, known)
    expected = node.meta.get("val")  # an assertion has none
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
        constant = replacement = _constant(gm, value, node)
        constant.meta["val"] = expected.clone()  # memory other than that of its copy
        if is_returned(node):  # the caller may write to it
            replacement = gm.graph.call_function(aten.clone.default, (constant,))
            replacement.meta.update(node.meta)
    known[constant] = known[replacement] = value
    node.replace_all_uses_with(replacement)


def _value(node: torch.fx.Node, known: dict[Any, Any]) -> Any:
    """Return the node's result. At the first request, torch runs the calls that lead to it."""
    if known[node] is node:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: _value(each, known))
        known[node] = node.target(*args, **kwargs)
    return known[node]
