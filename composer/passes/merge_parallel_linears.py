"""The pass that merges products that share an operand into one product."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.fx

from composer import _torch
from composer.graphs.writes import is_torchs
from composer.passes import order
from composer.passes.aliasing import Aliasing
from composer.passes.base import SHARED_MODULES, GraphPass
from composer.passes.gradients import Gradients
from composer.passes.node_modes import NodeModes

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ProductKind:
    """How products that share an operand are merged.

    Attributes:
        target: The operator.
        shared: The position of the shared operand.
        joined: The dimension along which the other operands are concatenated.
        cut: The dimension along which the result is sliced.
    """

    target: Any
    shared: int
    joined: int
    cut: int


_KINDS = (
    ProductKind(aten.linear.default, 0, 0, -1),
    ProductKind(aten.mm.default, 0, 1, 1),
    ProductKind(aten.mm.default, 1, 0, 0),
    ProductKind(aten.matmul.default, 0, 1, 1),
    ProductKind(aten.matmul.default, 1, 0, 0),
)

_COPY_IF_NEEDED = {
    aten.view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
"""Views that need memory without gaps, and the operators that copy if there are gaps."""

_SEE_STRIDES = frozenset(
    {"aten::as_strided", "aten::as_strided_", "aten::as_strided_scatter", "aten::view_as_complex"}
    | {"aten::sym_stride", "aten::sym_storage_offset"}
)


@dataclass(frozen=True)
class MergeParallelLinears(GraphPass):
    """Merge linear layers, or matrix products, that share an operand into one product.

    Examples are the queries, keys and values of attention, and the two halves of a gated layer. The
    other operands are concatenated in the graph. That costs one copy for each call, unless the
    engine treats weights as constants.

    Products are not merged in these cases:

    - An operand is computed after the first of the products, since it may depend on that product.
    - The dtypes differ, the autocast or grad mode differs, or only some products have a bias.
    - Only some operands need a gradient. After the merge all results would need one.
    - Only some results receive a gradient, for example because only a comparison uses the other
      one. After the merge its weight would receive zeros, and weight decay would change it.
    - The graph writes to an operand or a result.
    - A result or a view of it is returned, or is used by an operation that depends on strides
      (``as_strided``, ``view_as_complex``, ``view`` as another dtype, operators of other packages).
      The strides change.

    Similar: Inductor's ``split_cat`` and ``group_batch_fusion`` passes.

    Args:
        min_products: The smallest number of products to merge, at least 2.
    """

    keeps_numbers: ClassVar[bool] = True

    depends_on: ClassVar[tuple[str, ...]] = SHARED_MODULES

    min_products: int = 2

    def __post_init__(self) -> None:
        if self.min_products < 2:
            raise ValueError(f"min_products is at least 2, not {self.min_products}")

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Merge each group of products."""
        count = 0
        for kind in _KINDS:
            groups = [group for group in _groups(gm, kind) if len(group) >= self.min_products]
            # They are read before any merge, after which new nodes have no fake value yet.
            widths = {node: cast(int, _width(node, kind)) for node in itertools.chain(*groups)}
            for group in self.chosen(groups):
                _merge(gm, kind, group, widths)
                count += 1
        return count


def _groups(gm: torch.fx.GraphModule, kind: ProductKind) -> list[list[torch.fx.Node]]:
    aliasing, modes = Aliasing(gm), NodeModes.in_graph(gm.graph)
    gradients = Gradients(gm, aliasing, modes)
    readers = filter(_sees_strides, gm.graph.nodes)
    seen = {aliasing.root(source) for reader in readers for source in reader.all_input_nodes}
    groups: dict[Any, list[torch.fx.Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=kind.target):
        if aliasing.root(node) in seen or not _may_merge(node, kind, aliasing):
            continue
        # One entry for each operand, so products with and without a bias have different keys.
        needed = gradients.of_inputs(node), gradients.reach(node)
        key = node.args[kind.shared], modes.of[node], needed, node.meta["val"].dtype
        group = groups.setdefault(key, [node])
        if group[0] is not node and order.can_read(group[0], node.all_input_nodes):
            group.append(node)
    return list(groups.values())


def _may_merge(node: torch.fx.Node, kind: ProductKind, aliasing: Aliasing) -> bool:
    operands = node.all_input_nodes
    if aliasing.is_observed(node) or aliasing.is_written(*operands):
        return False
    given = [argument for argument in node.args if argument is not None]
    if node.kwargs or operands != given:
        return False
    if not all("val" in operand.meta for operand in operands):  # a slice of another merge
        return False
    left, right, *bias = [operand.meta["val"] for operand in operands]
    accepts_batches = node.target is aten.linear.default
    if right.dim() != 2 or (left.dim() != 2 and not accepts_batches):
        return False
    width = _width(node, kind)
    bias_shapes = [tuple(each.shape) for each in bias]
    if width is None or bias_shapes not in ([], [(width,)]):
        return False
    return all(operand.dtype is left.dtype for operand in (right, *bias))


def _sees_strides(node: torch.fx.Node) -> bool:
    """True if the result may depend on the strides of the inputs, not only on their content."""
    name = _torch.operators.operator_name(node.target)
    return name in _SEE_STRIDES or node.target is aten.view.dtype or not is_torchs(node)


def _width(node: torch.fx.Node, kind: ProductKind) -> int | None:
    """Return the size of this product's part of the merged result; ``None`` if it is dynamic."""
    size = _other(node, kind).meta["val"].shape[kind.joined]
    return size if type(size) is int else None


def _other(node: torch.fx.Node, kind: ProductKind) -> torch.fx.Node:
    return cast(torch.fx.Node, node.args[1 - kind.shared])


def _merge(
    gm: torch.fx.GraphModule,
    kind: ProductKind,
    group: list[torch.fx.Node],
    widths: Mapping[torch.fx.Node, int],
) -> None:
    call = gm.graph.call_function
    aliasing = Aliasing(gm)
    others = [_other(node, kind) for node in group]
    biases = [bias for node in group for bias in node.all_input_nodes[2:]]
    with gm.graph.inserting_before(group[0]):
        side_by_side = call(aten.cat.default, (others, kind.joined))
        operands = [side_by_side, side_by_side]
        operands[kind.shared] = cast(torch.fx.Node, group[0].args[kind.shared])
        if biases:
            operands.append(call(aten.cat.default, (biases,)))
        product = call(kind.target, tuple(operands))
        # Slices and not a split: a split is exported to ONNX as ``SplitToSequence``, which ONNX
        # Runtime does not have for bfloat16.
        ends = itertools.accumulate([widths[node] for node in group], initial=0)
        bounds = itertools.pairwise(ends)
        pieces = [call(aten.slice.Tensor, (product, kind.cut, *each)) for each in bounds]
    for node, piece in zip(group, pieces, strict=True):
        _let_views_copy(gm.graph, node, aliasing)
        node.replace_all_uses_with(piece)
        gm.graph.erase_node(node)


def _let_views_copy(graph: torch.fx.Graph, node: torch.fx.Node, aliasing: Aliasing) -> None:
    """Replace ``view`` by ``reshape`` in the views of a product.

    A slice of a larger tensor has gaps in memory. ``view`` then fails for some shapes, for which
    ``reshape`` makes a copy.
    """
    for target, copying in _COPY_IF_NEEDED.items():
        for view in graph.find_nodes(op="call_function", target=target):
            if aliasing.root(view) is aliasing.root(node):
                view.target = copying
