"""Gives returned views to torch, since an engine's outputs share memory with no other tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

import torch
import torch.fx

from composer import _torch
from composer.errors import refuse
from composer.graphs.nodes import call_behind, calls_of, is_pointwise
from composer.records import Reason, Status


def give_returned_views_to_torch(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Give returned views nodes of their own, which torch runs, and return these nodes.

    These are the views that share memory with another output or an input, and those that have gaps.
    Each chain of views is copied, from its base on, so that torch can run the copy on the engine's
    result or on the input. Memory, strides and offsets are then as in eager mode, for all shapes.
    Calls of the graph that read these views keep reading the original nodes.

    Raises:
        Refusal: ``declined``, where outputs share memory otherwise than as views.
    """
    (returned,) = gm.graph.find_nodes(op="output")
    outputs = [*filter(has_memory, returned.all_input_nodes)]
    inputs = [*filter(has_memory, gm.graph.find_nodes(op="placeholder"))]
    shared = Counter(map(memory_of, {*inputs, *outputs}))
    views = [n for n in outputs if shared[memory_of(n)] > 1 or not is_dense(n.meta["val"])]
    _decline_unless_views(views, {*map(memory_of, inputs)})
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in views:
        _copy_chain(node, returned, copies)
    returned.args = (tuple(copies.get(each, each) for each in returned.args[0]),)
    return set(copies.values())


def is_view(node: torch.fx.Node) -> bool:
    """True if the result is a view of the first argument, or one item of a list of views."""
    return _torch.operators.is_view(call_behind(node).target)


_READ_MEMORY = {"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"}
_READ_MEMORY |= {"prims::as_strided", "prims::as_strided_scatter"}
_BY_ROWS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
_BY_ROWS |= {"aten::mean", "aten::sum", "aten::amax", "aten::amin"}
"""Products and reductions, whose results are row-major whatever the strides of the operands."""


def reads_memory(node: torch.fx.Node) -> bool:
    """True if the result depends on the strides of the operand, which ONNX does not know."""
    return _torch.operators.operator_name(node.target) in _READ_MEMORY


def decline_unsure_memory(gm: torch.fx.GraphModule) -> None:
    """Refuse a graph that reads memory by strides where torch may predict other strides.

    For some operators, torch's fake tensors have other strides than the results of the kernels
    (torch 2.13). Examples are ``roll`` and ``channel_shuffle`` of a tensor that is not row-major
    (pytorch/pytorch#174963).

    Raises:
        Refusal: ``declined``, where memory of unknown strides is read.
    """
    if not any(map(reads_memory, gm.graph.nodes)):
        return
    unsure: set[torch.fx.Node] = set()
    for node in calls_of(gm):
        reads_unsure = not unsure.isdisjoint(map(base_of, node.all_input_nodes))
        if reads_unsure and reads_memory(node):
            what = f"{node.target} reads memory of which torch does not say surely how it lies"
            refuse(Status.DECLINED, Reason.OUTPUT_MISMATCH, what)
        if not _fixes_strides(node) and (reads_unsure or not _predicts_strides(node)):
            unsure.add(node)


def _fixes_strides(node: torch.fx.Node) -> bool:
    """True if the result is row-major, or its strides follow from those of the first operand."""
    is_row_major = _torch.operators.operator_name(node.target) in _BY_ROWS
    return is_row_major or is_view(node) or reads_memory(node)


def _predicts_strides(node: torch.fx.Node) -> bool:
    """True if torch's fake tensors have the strides of the kernel's result for these operands.

    They do for elementwise operators on dense operands, and for any operator on row-major ones.
    """
    values = [source.meta.get("val") for source in node.all_input_nodes]
    operands = [value for value in values if isinstance(value, torch.Tensor)]
    if not all(map(is_dense, operands)):
        return False
    is_clone = node.target is torch.ops.aten.clone.default  # may be made by a decomposition
    return (is_pointwise(node) and not is_clone) or not any(map(_is_permuted, operands))


def _is_permuted(value: torch.Tensor) -> bool:
    """True if a dense tensor is not row-major."""
    sizes, strides = map(_torch.symbols.hint, value.shape), map(_torch.symbols.hint, value.stride())
    steps = [stride for size, stride in zip(sizes, strides, strict=True) if size != 1]
    return steps != sorted(steps, reverse=True)


def is_dense(value: torch.Tensor) -> bool:
    """True if the elements lie without gaps or repetition, in some order of the dimensions.

    False where a size or a stride depends on data, since it cannot be known then.
    """
    if any(map(_torch.symbols.depends_on_data, (*value.shape, *value.stride()))):
        return False
    sizes = [*map(_torch.symbols.value_for_strides, value.shape)]
    strides = map(_torch.symbols.value_for_strides, value.stride())
    if 0 in sizes:
        return True
    dims = sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True


def _copy_chain(
    node: torch.fx.Node, before: torch.fx.Node, copies: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """Copy the chain of views that ends at ``node``, without its base, and return the copy."""
    if not is_view(node):
        return node
    if node not in copies:
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        twin = _copy_chain(source, before, copies)
        with node.graph.inserting_before(before):
            copies[node] = node.graph.node_copy(node, lambda n: twin if n is source else n)
    return copies[node]


def _decline_unless_views(outputs: Iterable[torch.fx.Node], inputs: Set[int]) -> None:
    """Refuse outputs that share memory, unless they are views of inputs or of one computed node.

    Inputs may share memory with each other: torch makes a view of an input from the tensor that the
    caller passes.
    """
    bases: dict[int, torch.fx.Node] = {}
    for node in outputs:
        base, memory = base_of(node), memory_of(node)
        is_of_input = base.op == "placeholder"
        if not is_of_input and (memory in inputs or bases.setdefault(memory, base) is not base):
            what = "outputs share memory, with an input or each other, otherwise than as views"
            refuse(Status.DECLINED, Reason.OUTPUT_MISMATCH, what)


def is_returned(node: torch.fx.Node) -> bool:
    """True if the graph returns a node's result or a view of it."""
    views = filter(is_view, node.users)
    return any(user.op == "output" for user in node.users) or any(map(is_returned, views))


def base_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return the base of a chain of views: the first node that is not a view."""
    while is_view(node):
        (node, *_) = node.all_input_nodes
    return node


def memory_of(node: torch.fx.Node) -> int:
    """Return a number that is equal for nodes that share memory; see :func:`has_memory`."""
    return _torch.tensors.storage_id(node.meta["val"])


def has_memory(node: torch.fx.Node) -> bool:
    """True if the node is one strided tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
