"""The work of a call, by which an engine's share of a graph is counted.

A graph's nodes differ too much to be counted as equals: one matrix product can take longer than all
other nodes together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from composer import _torch
from composer.graphs.nodes import calls_of, graphs_in, tensors_of
from composer.lowering.operators.entry import operands_of

aten = torch.ops.aten

_LIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators without a formula in torch (2.11 to 2.15), and those whose formula holds for them."""

_LOOKUPS = (
    *(aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only),
    *(aten.index, aten._unsafe_index, aten.index_select, aten.gather, aten.take),
)
"""Operators that read only the elements of a table that they return."""


def work_of(node: torch.fx.Node) -> int:
    """Return the number of operations that a call computes, at the sizes of the first call.

    Products, convolutions and attention have torch's formulas (``torch.utils.flop_counter``), and
    so have operators for which the program registered one. A call of graphs, such as a
    ``torch.cond``, has the work of all of them. Any other call has one operation for each element
    of the largest tensor that it reads or writes. It has at least one, and it sets no guard.
    """
    formula = _formula_of(node)
    if formula is not None:
        return max(1, int(formula(*_arguments(node), out_val=_stand_in(node.meta.get("val")))))
    within = sum(work_of(call) for gm in graphs_in(node) for call in calls_of(gm))
    tensors = [*tensors_of(node)]
    if _packet(node) not in _LOOKUPS:
        tensors += operands_of(node)
    if any(isinstance(each, _torch.operators.OpOverload) for each in node.args):
        # A draw that a checkpoint repeats. The state of its generator is no work.
        tensors = [each for each in tensors if each.dtype is not torch.uint8]
    return max(1, within, *(math.prod(_sizes(each)) for each in tensors))


def _packet(node: torch.fx.Node) -> Any:
    """Return the operator of a call without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def _formula_of(node: torch.fx.Node) -> Callable[..., Any] | None:
    packet = _packet(node)
    return flop_registry.get(_LIKE.get(packet, packet))


def _arguments(node: torch.fx.Node) -> list[Any]:
    """Return the arguments of a call in the order of its schema, as a formula takes them.

    Arguments that have to be passed by keyword change no formula of torch's.
    """
    args: Any = node.args
    if isinstance(node.target, _torch.operators.OpOverload):
        schema = node.target._schema.arguments
        names = [each.name for each in schema if not each.kwarg_only]
        args = [_torch.operators.argument(node, name) for name in names]
    return [*map_arg(args, lambda source: _stand_in(source.meta.get("val")))]


def _stand_in(value: Any) -> Any:
    """Return a value without symbols: formulas compare sizes, which would set guards."""
    if isinstance(value, torch.Tensor):
        return torch.empty(_sizes(value), device="meta")
    if isinstance(value, list | tuple):
        return [_stand_in(each) for each in value]
    return _torch.symbols.hint(value)


def _sizes(tensor: torch.Tensor) -> list[int]:
    """Return the sizes in the first call. A size that only the data tell counts as 1."""
    sizes = map(_torch.symbols.hint, tensor.shape)
    return [1 if size is None else size for size in sizes]
