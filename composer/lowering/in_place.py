"""Writes to a part of an input, such as a cache of keys and values, are done in place.

A functional graph makes a new tensor from such an input, and the tensor is copied back after the
call. The whole cache then moves several times to write the place of one token. Where no other call
reads the old value of the input, the part can be written into the input itself, and later calls
read it there.

**Torch writes.** Without the new tensor, the graph no longer says which calls come before the
write. So the write waits for two kinds of calls before it: those that might read the same memory
through another input, and those that might raise, since a call that raises must write nothing. The
version of the input rises when AOTAutograd copies the input back onto itself. If an engine fails
after a write, the fallback answers the call and writes to the same places again.

**An engine writes.** This needs an operator that copies its input first, unless its result is given
the same memory, such as ONNX Runtime's ``ScatterND``. The graph then stays functional and is not
cut. Each call before the write that might raise must be one of the nodes that the write depends on.
If another input turns out to be the same memory at a call (:mod:`composer.graphs.sharing`), the
result gets memory of its own and is copied back. That check sees only the inputs of one region.
Where the graph is cut anyway, the write must therefore also depend on each earlier call that reads
an input.

Inductor's reinplacing pass is similar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs import low_precision
from composer.graphs.nodes import are_static, drop_unread, is_pointwise, tensors_of
from composer.lowering import rows
from composer.lowering.aot import FunctionalGraph
from composer.lowering.views import base_of, has_memory, is_view, memory_of

aten = torch.ops.aten

WHY = "written in place"

_TWINS: Mapping[Any, Callable[..., Any]] = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
}
"""Operators that write values to places of a copy, and the operators that write in place."""

_VIEWS: Mapping[Any, Callable[..., Any]] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
"""Operators that replace the part that a view shows, and the view."""

_WHERE = {
    aten.slice.Tensor: ("dim", "start", "end", "step"),
    aten.select.int: ("dim", "index"),
}
"""The arguments that say what a view shows. The operators of ``_VIEWS`` use the same names."""

_LARGE = 1 << 17
"""Size in bytes of an input that takes as long to move as cutting the graph costs.

Measured on two cores (bench/generation.py).
"""

_DIVISIONS = frozenset({"aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod"})
"""Elementwise operators that may still raise, where the operands are integers."""

_COPIES = (
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
)

_Places = tuple[torch.fx.Node, int]
"""The indices of rows along one dimension, and the size of the dimension."""

_BY_ENGINE = "composer_written_by_engine"
"""Key in a node's ``meta``: the node's result may use the memory of its first argument."""


@dataclass(frozen=True, slots=True)
class Write:
    """A call that copies a tensor and replaces some places of the copy.

    Attributes:
        call: The call.
        before: The tensor that is copied. No other call reads it.
        twin: The function that writes to ``before`` instead, and returns it.
        args: The arguments of ``twin`` after ``before``.
    """

    call: torch.fx.Node
    before: torch.fx.Node
    twin: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """An input that may be written to.

    Attributes:
        at: The position of the input.
        is_large: True if moving the input takes longer than cutting the graph.
        writes: The calls that make the new value from the input, the last one first.
    """

    at: int
    is_large: bool
    writes: tuple[Write, ...]

    @property
    def calls(self) -> set[torch.fx.Node]:
        """The calls of all writes to this input."""
        return {each.call for each in self.writes}


def writable_inputs(graph: FunctionalGraph) -> list[Written]:
    """Return the inputs whose new values the graph could write in place.

    Args:
        graph: The graph. Its ``written`` says which outputs are copied back to inputs.
    """
    inputs = graph.gm.graph.find_nodes(op="placeholder")
    (returned,) = graph.gm.graph.find_nodes(op="output")
    outputs = returned.args[0]
    nodes = [output for output in outputs if isinstance(output, torch.fx.Node)]
    sharers = Counter(map(memory_of, filter(has_memory, nodes)))
    found: list[Written] = []
    for position, index in graph.written.items():
        source, value = inputs[index], outputs[position]
        writes = _writes_between(source, value)
        if writes and sharers[memory_of(value)] == 1:
            found.append(Written(index, _is_large(source), writes))
    return found


def leave_to_engine(
    graph: FunctionalGraph,
    inputs: Iterable[Written],
    writes: Callable[[torch.fx.Node], bool],
    refused: Collection[torch.fx.Node],
) -> list[Written]:
    """Mark the writes that an engine may do in place, and return the inputs that it writes to.

    The engine may compute the graph in any order. Such a write puts rows along one dimension of a
    contiguous input. All sizes in the graph must be known.

    Args:
        graph: The graph.
        inputs: Some of its :func:`writable_inputs`.
        writes: Returns True if the engine can do this call in place.
        refused: The calls that are left to torch.
    """
    if not all(map(_has_known_sizes, graph.gm.graph.nodes)):
        return []
    candidates = _writes_of_rows(inputs, writes)
    is_cut = refused or low_precision.marked(graph.gm.graph)
    read = _inputs(graph) if is_cut else set[torch.fx.Node]()
    before, taken = list[torch.fx.Node](), list[Written]()
    for node in graph.gm.graph.nodes:
        if node in candidates:
            places, written = candidates[node]
            needed = set[torch.fx.Node]()
            _add_sources(node, needed)
            # where one write to these places raises, all do
            needed.update(call for call, (others, _) in candidates.items() if others == places)
            if needed.issuperset(before):
                node.meta[_BY_ENGINE] = True
                taken.append(written)
        if _must_come_before(node, read, refused):
            before.append(node)
    return taken


def never(_: torch.fx.Node) -> bool:
    """Return False: the answer of an engine that leaves all writes to torch."""
    return False


def rewritten(gm: torch.fx.GraphModule) -> dict[int, int]:
    """Map the position of each output that may use a placeholder's memory to the placeholder's."""
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    (returned,) = gm.graph.find_nodes(op="output")
    rewritten: dict[int, int] = {}
    for node in returned.all_input_nodes:
        if _BY_ENGINE in node.meta and node.args[0] in inputs:
            rewritten[returned.args[0].index(node)] = inputs[node.args[0]]
    return rewritten


def put_in_place(
    graph: FunctionalGraph, inputs: Iterable[Written], refused: Collection[torch.fx.Node]
) -> None:
    """Change the graph so that torch writes into these inputs, and makes no new tensors from them.

    Each write waits for the calls before it that read an input or might raise.
    """
    writes = [write for written in inputs for write in written.writes]
    for write in writes:
        args: Any = write.before, *write.args
        write.call.target, write.call.args = write.twin, args
    drop_unread(graph.gm.graph)
    _keep_order(graph, {write.call for write in writes}, refused)


def write_by(x: torch.Tensor, operator: Callable[..., Any], *args: Any, after: Any = ()) -> Any:
    """Have an operator write to ``x`` in place, and return ``x``.

    The version of ``x`` does not rise here, since ``x.data`` has a version of its own. AOTAutograd
    raises it when it copies back.

    Args:
        x: The tensor.
        operator: An operator that writes to its first argument.
        args: The operator's further arguments.
        after: Results of calls that must run first. They are not used.
    """
    operator(x.data, *args)
    return x


def write_to_view(
    x: torch.Tensor, source: torch.Tensor, path: Sequence[Any], *, after: Any = ()
) -> Any:
    """Copy ``source`` into a view of ``x``, and return ``x``; otherwise like :func:`write_by`.

    Args:
        x: The tensor.
        source: The values.
        path: The chain of views from ``x`` to the view, each an operator and its arguments.
        after: Results of calls that must run first. They are not used.
    """
    view = x.data
    for operator, *where in path:
        view = operator(view, *where)
    view.copy_(source)
    return x


def _keep_order(
    graph: FunctionalGraph, written: set[torch.fx.Node], refused: Collection[torch.fx.Node]
) -> None:
    """Have each write wait for earlier writes, and for calls that read inputs or might raise."""
    ordered, before = set[torch.fx.Node](), list[torch.fx.Node]()
    inputs = _inputs(graph)
    for node in list(graph.gm.graph.nodes):
        if node in written:
            _add_sources(node, ordered)
            waits = tuple(call for call in before if call not in ordered)
            for call in waits:
                _add_sources(call, ordered)
            node.kwargs = {"after": waits}
            before = [node]
        elif _must_come_before(node, inputs, refused):
            before.append(node)


def _writes_of_rows(
    inputs: Iterable[Written], writes: Callable[[torch.fx.Node], bool]
) -> dict[torch.fx.Node, tuple[_Places, Written]]:
    """Return the calls that write rows and that the engine can do, with their places and inputs."""
    found: dict[torch.fx.Node, tuple[_Places, Written]] = {}
    for written in inputs:
        call = written.writes[0].call
        places = _places_of(written) if writes(call) else None
        if places is not None:
            found[call] = places, written
    return found


def _has_known_sizes(node: torch.fx.Node) -> bool:
    is_symbol = isinstance(node.meta.get("val"), torch.SymInt)
    return not is_symbol and all(are_static(tensor.shape) for tensor in tensors_of(node))


def _places_of(written: Written) -> _Places | None:
    """Return the places at which rows are put; ``None`` if no engine can do this in place."""
    write, *others = written.writes
    if others or write.call.target is not aten.index_put.default:
        return None
    value = write.before.meta["val"]
    if not value.is_contiguous() or not value.is_floating_point():
        return None
    indices: Any = write.call.args[1]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if len(dims) != 1:
        return None
    (dim,) = dims
    index = indices[dim].meta["val"]
    if index.dtype is not torch.int64 or index.dim() != 1:
        return None
    if not rows.are_few(value.shape, dim, index.shape[0]):
        return None
    return indices[dim], value.shape[dim]


def _inputs(graph: FunctionalGraph) -> set[torch.fx.Node]:
    """Return the placeholders that are not weights."""
    inputs = enumerate(graph.gm.graph.find_nodes(op="placeholder"))
    return {node for i, node in inputs if i not in graph.weights}


def _may_raise(call: torch.fx.Node, refused: Collection[torch.fx.Node]) -> bool:
    """True if a call might raise for some values of its inputs.

    Elementwise calls do not raise, except where an integer is divided by zero. Operators that raise
    are refused, so a call that an engine takes can raise only for an index out of range or a mask
    of the wrong length. Such a call reads integers or truth values. Assertions have an effect.
    """
    reads_integers = any(map(_is_of_integers, call.all_input_nodes))
    if _torch.operators.operator_name(call.target) in _DIVISIONS:
        return reads_integers
    if call.target in _COPIES or is_pointwise(call):
        return False
    return reads_integers or call in refused or _torch.operators.has_effect(call.target)


def _is_of_integers(node: torch.fx.Node) -> bool:
    """True if the node is a tensor of integers or truth values."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _add_sources(node: torch.fx.Node, found: set[torch.fx.Node]) -> None:
    """Add a node, and all nodes that it depends on, to ``found``.

    The sources of a node that is there already are there as well.
    """
    pending = [node]
    while pending:
        source = pending.pop()
        if source not in found:
            found.add(source)
            pending += source.all_input_nodes


def _must_come_before(
    node: torch.fx.Node, inputs: set[torch.fx.Node], refused: Collection[torch.fx.Node]
) -> bool:
    """True if the node is a call that reads one of these inputs, or that might raise."""
    if node.op != "call_function" or is_view(node):
        return False
    reads_input = not inputs.isdisjoint(map(base_of, node.all_input_nodes))
    return reads_input or _may_raise(node, refused)


def _writes_between(source: torch.fx.Node, value: torch.fx.Node) -> tuple[Write, ...]:
    """Return the chain of writes that turns ``source`` into ``value``, the last one first.

    Empty if a call that is not a write takes part.
    """
    writes: list[Write] = []
    while value is not source:
        write = _write_of(value)
        if write is None:
            return ()
        writes.append(write)
        value = write.before
    return tuple(writes)


def _write_of(value: torch.fx.Node) -> Write | None:
    """Return the write that makes a value; ``None`` if another call makes it."""
    if value.target in _VIEWS:
        return _write_by_views(value)
    if value.target not in _TWINS or _adds(value) or value.kwargs:
        return None
    before, *args = value.args
    others, _ = _torch.tensors.flatten(args)
    if not isinstance(before, torch.fx.Node) or before in others or len(before.users) > 1:
        return None
    return Write(value, before, write_by, (_TWINS[value.target], *args))


def _write_by_views(value: torch.fx.Node) -> Write | None:
    """Return the write that a call such as ``x[0, :, 3:5] = y`` makes, if it is one.

    In a functional graph this is a chain of views of ``x``, a copy, and one ``_VIEWS`` operator for
    each view, in reverse order. The graph makes the views again for each of these operators. No
    other call may read ``x`` or the views, so that no call sees the old values.
    """
    before = value.all_input_nodes[0]
    path, parts, views, step = list[Any](), {value}, [before], value
    while step.target in _VIEWS:
        shown = _shown(step)
        path.append(shown)
        users = [user for view in views for user in view.users]
        views = [user for user in users if user.target is shown[0] and _shown(user) == shown]
        parts.update(views)
        source: Any = step.args[1]
        if not _writes_to_one_of(views, source):
            break
        parts.add(source)
        step, source = source, source.args[1]
    replaced = {before, *parts} - {value}
    readers = {user for node in replaced for user in node.users}
    if source in replaced or not readers <= parts:
        return None
    return Write(value, before, write_to_view, (source, tuple(path)))


def _writes_to_one_of(views: Sequence[torch.fx.Node], value: Any) -> bool:
    """True if a value is a copy of one of these views, with other numbers in it."""
    if not isinstance(value, torch.fx.Node) or value.target not in (aten.copy.default, *_VIEWS):
        return False
    return value.args[0] in views


def _shown(call: torch.fx.Node) -> tuple[Any, ...]:
    """Return the view that a call makes or replaces, with its arguments; empty for other calls."""
    view = _VIEWS.get(call.target, call.target)
    if view not in _WHERE:
        return ()
    return view, *(_torch.operators.argument(call, each) for each in _WHERE[view])


def _adds(call: torch.fx.Node) -> bool:
    """True if the call adds to the numbers at its places instead of replacing them."""
    is_of_rows = call.target is aten.index_put.default
    return is_of_rows and bool(_torch.operators.argument(call, "accumulate"))


def _is_large(placeholder: torch.fx.Node) -> bool:
    value = placeholder.meta["val"]
    elements = value.numel()
    if _torch.symbols.is_unbacked(elements):
        return True
    return int(_torch.symbols.hint(elements)) * int(value.itemsize) >= _LARGE
