"""The pass that computes matrix products in bfloat16, and everything else in float32."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx

from composer import _torch
from composer.passes import ahead, metadata
from composer.passes.aliasing import Aliasing, holds_memory
from composer.passes.base import SHARED_MODULES, GraphPass
from composer.passes.node_modes import Modes, NodeModes

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {"aten::linear", "aten::matmul", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}
    | {"aten::addbmm", "aten::einsum", "aten::scaled_dot_product_attention", "aten::convolution"}
    | {f"aten::conv{n}d" for n in (1, 2, 3)}
    | {f"aten::conv_transpose{n}d" for n in (1, 2, 3)}
)
"""The operators to lower: those of ``torch.autocast``'s list for the CPU."""

_MOVES = frozenset(
    {"aten::view", "aten::reshape", "aten::flatten", "aten::unflatten", "aten::transpose"}
    | {"aten::t", "aten::permute", "aten::movedim", "aten::unsqueeze", "aten::squeeze"}
    | {"aten::expand", "aten::select", "aten::slice", "aten::narrow", "aten::split", "aten::chunk"}
    | {"aten::split_with_sizes", "aten::unbind", "aten::contiguous", "aten::clone"}
)
"""Operators that move elements without changing them; for a bfloat16 input they return bfloat16."""


@dataclass(frozen=True)
class LowerPrecision(GraphPass):
    """Compute float32 products and convolutions in bfloat16, and cast their results to float32.

    The inputs of a product are rounded to bfloat16, and its result is rounded as well. If only
    views stand between two products, the second one takes the bfloat16 result of the first one
    directly. Softmax, norms, sums, elementwise operations and attention masks stay in float32.

    The pass leaves products alone on other devices than the CPU, with other dtypes, and in an
    autocast region, enabled or disabled. In such a region the user has already chosen the dtype.

    The casts are part of the graph, so gradients flow through them and arrive in float32.

    Similar: ``torch.autocast("cpu", torch.bfloat16)``, for eager code.

    Attributes:
        wide: Which of the products stay in float32, counted from the start of the graph.
    """

    wide: tuple[int, ...] = ()

    depends_on: ClassVar[tuple[str, ...]] = (*SHARED_MODULES, "composer.passes.ahead")

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Put casts around each product."""
        narrowing = _Narrowing(gm.graph, Aliasing(gm), NodeModes.in_graph(gm.graph))
        chosen = list(self.chosen(without(products_of(gm), self.wide)))
        for product in chosen:
            narrowing.lower(product)
        return len(chosen)


def products_of(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the products of a graph at stage ``aten`` that may be lowered, in graph order."""
    modes = NodeModes.in_graph(gm.graph)
    return [node for node in gm.graph.nodes if _lowers(node, modes)]


def without(products: list[torch.fx.Node], wide: Collection[int]) -> list[torch.fx.Node]:
    """Return the products that do not stay in float32."""
    return [node for place, node in enumerate(products) if place not in wide]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in bfloat16."""
    return weight.to(torch.bfloat16)


def _lowers(node: torch.fx.Node, modes: NodeModes) -> bool:
    if not _multiplies(node) or _torch.operators.written_by(node) or modes.of[node].autocast:
        return False
    return all(map(_is_wide, (node, *_operands(node))))


def _multiplies(node: torch.fx.Node) -> bool:
    """True if the node is a product.

    An einsum is a product if it sums over an index that several operands have. Other einsums are
    elementwise, such as the outer product of positions and frequencies, or views.
    """
    name = _torch.operators.operator_name(node.target)
    if name != "aten::einsum":
        return name in _PRODUCTS
    operands, _, result = str(_torch.operators.argument(node, "equation")).partition("->")
    letters = itertools.chain.from_iterable(map(set, operands.split(",")))
    kept = {*result, ".", " "}
    return any(count > 1 and each not in kept for each, count in Counter(letters).items())


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the operands to round. A mask is left out: attention accepts it in float32."""
    operands = list(filter(holds_memory, node.all_input_nodes))
    if _torch.operators.operator_name(node.target) == "aten::scaled_dot_product_attention":
        mask = _torch.operators.argument(node, "attn_mask")
        operands = [operand for operand in operands if operand is not mask]
    return operands


def _is_wide(node: torch.fx.Node) -> bool:
    """True if the node's value is a dense float32 tensor on the CPU."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    kind = value.dtype, value.device.type, value.layout
    return kind == (torch.float32, "cpu", torch.strided)


class _Narrowing:
    """Lowers products in one graph, and remembers the bfloat16 values that it made.

    A cast is used again only under the same grad mode and autocast state. A value that the graph
    writes to is cast again for each product.
    """

    def __init__(self, graph: torch.fx.Graph, aliasing: Aliasing, modes: NodeModes) -> None:
        self._graph = graph
        self._aliasing = aliasing
        self._modes = modes
        self._products: dict[torch.fx.Node, torch.fx.Node] = {}
        self._made: dict[tuple[torch.fx.Node, Modes], torch.fx.Node] = {}

    def lower(self, product: torch.fx.Node) -> None:
        """Lower one product; its users then read a cast of its result to float32."""
        operands = set(_operands(product))

        def narrow(each: torch.fx.Node) -> torch.fx.Node:
            return self._narrow(each, product) if each in operands else each

        product.args = torch.fx.map_arg(product.args, narrow)
        product.kwargs = torch.fx.map_arg(product.kwargs, narrow)
        with self._graph.inserting_after(product):
            wide = self._graph.call_function(aten.to.dtype, (product, torch.float32))
        wide.meta.update(metadata.provenance(product))
        product.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
        self._products[wide] = product

    def _narrow(self, node: torch.fx.Node, reader: torch.fx.Node) -> torch.fx.Node:
        if self._aliasing.is_written(self._products.get(node, node)):
            return self._cast(node, reader)
        if node in self._products:
            return self._products[node]
        key = node, self._modes.of[reader]
        if key not in self._made:
            self._made[key] = self._rounded(node, reader)
        return self._made[key]

    def _rounded(self, node: torch.fx.Node, reader: torch.fx.Node) -> torch.fx.Node:
        if not self._is_moved(node, reader):
            return self._cast(node, reader)
        source: Any = node.args[0]
        args = self._narrow(source, reader), *node.args[1:]
        return self._emit(reader, node, node.target, args, node.kwargs)

    def _is_moved(self, node: torch.fx.Node, reader: torch.fx.Node) -> bool:
        """True if the node is a view of a weight, or of a product that already gives bfloat16.

        All views must be under the grad mode and autocast state of ``reader``, since gradients may
        flow under one state and not under another.
        """
        modes = self._modes.of[reader]
        while _moves(node) and self._modes.of[node] == modes:
            source: Any = node.args[0]
            node = source
            if self._aliasing.is_written(self._products.get(node, node)):
                return False
            if node in self._products or _torch.dynamo.is_static_input(node):
                return True
        return False

    def _cast(self, node: torch.fx.Node, reader: torch.fx.Node) -> torch.fx.Node:
        made = self._emit(reader, node, aten.to.dtype, (node, torch.bfloat16), {})
        ahead.mark(made, node, rounded)
        return made

    def _emit(
        self, reader: torch.fx.Node, of: torch.fx.Node, target: Any, args: Any, kwargs: Any
    ) -> torch.fx.Node:
        with self._graph.inserting_before(reader):
            made = self._graph.call_function(target, args, kwargs)
        made.meta.update(metadata.provenance(of))
        return made


def _moves(node: torch.fx.Node) -> bool:
    name = _torch.operators.operator_name(node.target)
    if name not in _MOVES and node.target is not operator.getitem:
        return False
    return isinstance(node.args[0], torch.fx.Node) and torch.dtype not in map(type, node.args)
