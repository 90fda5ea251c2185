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
from torch.fx.node import map_arg

from composer import _torch
from composer.graphs import low_precision
from composer.graphs.nodes import drop_unread
from composer.lowering import rows
from composer.lowering.aot import FunctionalGraph
from composer.lowering.views import is_view

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
    *(aten._to_copy.default, torch.ops.prims.convert_element_type.default),
    *(aten.clone.default, aten.lift_fresh_copy.default),
)

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
    shared = Counter(map(_memory, outputs))
    alone = {at: i for at, i in graph.written.items() if shared[_memory(outputs[at])] == 1}
    found = {i: _writes_between(inputs[i], outputs[at]) for at, i in alone.items()}
    return [Written(i, _is_large(inputs[i]), writes) for i, writes in found.items() if writes]


def leave_to_engine(
    graph: FunctionalGraph,
    inputs: Iterable[Written],
    writes: Callable[[torch.fx.Node], bool],
    refused: Collection[torch.fx.Node],
) -> list[Written]:
    """Mark the writes that an engine may do in place, whatever order it computes the graph in.

    Such a write puts rows along one dimension of a contiguous input. All sizes in the graph must be
    known.

    Args:
        graph: The graph.
        inputs: Some of its :func:`writable_inputs`.
        writes: Returns True if the engine can do this call in place.
        refused: The calls that are left to torch.

    Returns:
        The inputs to which the engine may write.
    """
    if not all(map(_has_known_sizes, graph.gm.graph.nodes)):
        return []
    asked = (each for each in inputs if writes(each.writes[0].call))
    found = {each.writes[0].call: (at, each) for each in asked if (at := _places_of(each))}
    seen = _inputs(graph) if refused or low_precision.marked(graph.gm.graph) else set()
    noticing, free = list[torch.fx.Node](), list[Written]()
    for node in graph.gm.graph.nodes:
        if node in found:
            places, written = found[node]
            needed = set[torch.fx.Node]()
            _settle(node, needed)
            # where one write to these places raises, all do
            needed |= {call for call, (others, _) in found.items() if others == places}
            if needed.issuperset(noticing):
                node.meta[_BY_ENGINE] = True
                free.append(written)
        if _notices(node, seen, refused):
            noticing.append(node)
    return free


def never(_: torch.fx.Node) -> bool:
    """Return False: the answer of an engine that leaves all writes to torch."""
    return False


def rewritten(gm: torch.fx.GraphModule) -> dict[int, int]:
    """Map the position of each output that may use a placeholder's memory to the placeholder's."""
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    (returned,) = gm.graph.find_nodes(op="output")
    outputs = enumerate(returned.args[0])
    marked = {i: each.args[0] for i, each in outputs if _is_by_engine(each)}
    return {i: inputs[source] for i, source in marked.items() if source in inputs}


def put_in_place(
    graph: FunctionalGraph, inputs: Iterable[Written], refused: Collection[torch.fx.Node]
) -> None:
    """Have torch write into these inputs, instead of making new tensors from them.

    Args:
        graph: The graph, which is changed.
        inputs: Some of its :func:`writable_inputs`.
        refused: The calls that are left to torch.
    """
    written = set[torch.fx.Node]()
    for each in (write for found in inputs for write in found.writes):
        args: Any = each.before, *each.args
        each.call.target, each.call.args = each.twin, args
        written.add(each.call)
    drop_unread(graph.gm.graph)
    _keep_order(graph, written, refused)


def write_by(x: torch.Tensor, operator: Callable[..., Any], *args: Any, after: Any = ()) -> Any:
    """Have an operator write to ``x`` in place, and return ``x``.

    The version of ``x`` does not rise here, since ``x.data`` has a version of its own. AOTAutograd
    raises it when it copies back.

    Args:
        x: The tensor that is written to.
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
        x: The tensor that is written to.
        source: The values.
        path: The chain of views that leads from ``x`` to the view. Each step is an operator and its
            arguments.
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
    settled, noticing = set[torch.fx.Node](), list[torch.fx.Node]()
    seen = _inputs(graph)
    for node in list(graph.gm.graph.nodes):
        if node in written:
            _settle(node, settled)
            waits = tuple(each for each in noticing if each not in settled)
            for each in waits:
                _settle(each, settled)
            node.kwargs = {"after": waits} if waits else {}
            noticing = [node]
        elif _notices(node, seen, refused):
            noticing.append(node)


def _is_by_engine(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and bool(value.meta.get(_BY_ENGINE))


def _has_known_sizes(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    sizes = (size for each in values if isinstance(each, torch.Tensor) for size in each.shape)
    return not isinstance(value, torch.SymInt) and all(isinstance(size, int) for size in sizes)


def _places_of(written: Written) -> tuple[torch.fx.Node, int] | None:
    """Return the places at which rows are put along one dimension, and the dimension's size.

    ``None`` if an engine cannot do this write in place.
    """
    write, *more = written.writes
    value = write.before.meta["val"]
    if more or write.call.target is not aten.index_put.default or write.before.op != "placeholder":
        return None
    if not value.is_contiguous() or not value.is_floating_point():
        return None
    indices: Any = write.call.args[1]
    found = [(dim, each) for dim, each in enumerate(indices) if each is not None]
    if len(found) != 1:
        return None
    ((dim, places),) = found
    index = places.meta["val"]
    fits = index.dtype is torch.int64 and index.dim() == 1
    if not fits or not rows.are_few(value.shape, dim, index.shape[0]):
        return None
    return places, value.shape[dim]


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
    name, counts = _torch.operators.operator_name(call.target), map(_counts, call.all_input_nodes)
    if name in _DIVISIONS:
        return any(counts)
    if call.target in _COPIES or torch.Tag.pointwise in getattr(call.target, "tags", ()):
        return False
    return call in refused or _torch.operators.has_effect(call.target) or any(counts)


def _counts(node: torch.fx.Node) -> bool:
    """True if the node is a tensor of integers or truth values."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _settle(node: torch.fx.Node, settled: set[torch.fx.Node]) -> None:
    """Add a node, and all nodes that it depends on, to ``settled``."""
    open_ones = [node]
    while open_ones:
        each = open_ones.pop()
        if each not in settled:
            settled.add(each)
            open_ones += each.all_input_nodes


def _notices(
    node: torch.fx.Node, inputs: set[torch.fx.Node], refused: Collection[torch.fx.Node]
) -> bool:
    """True if the node is a call that reads one of these inputs, or that might raise."""
    if node.op != "call_function" or is_view(node):
        return False
    return any(_base(each) in inputs for each in node.all_input_nodes) or _may_raise(node, refused)


def _base(node: torch.fx.Node) -> torch.fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _writes_between(source: torch.fx.Node, value: Any) -> tuple[Write, ...]:
    """Return the chain of writes that turns ``source`` into ``value``, the last one first.

    Empty if a call that is not a write takes part.
    """
    found: list[Write] = []
    while value is not source:
        write = _write(value) if isinstance(value, torch.fx.Node) else None
        if write is None:
            return ()
        found.append(write)
        value = write.before
    return tuple(found)


def _write(value: torch.fx.Node) -> Write | None:
    if value.target in _VIEWS:
        return _write_by_views(value)
    if value.target not in _TWINS or _adds(value) or value.kwargs:
        return None
    before, *given = value.args
    if not isinstance(before, torch.fx.Node) or before in _nodes(given):
        return None
    if [*before.users] != [value]:
        return None
    return Write(value, before, write_by, (_TWINS[value.target], *given))


def _write_by_views(value: torch.fx.Node) -> Write | None:
    """Return the write that a call such as ``x[0, :, 3:5] = y`` makes, if it is one.

    In a functional graph this is a chain of views of ``x``, a copy, and one ``_VIEWS`` operator for
    each view, in reverse order. The graph makes the views again for each of these operators. No
    other call may read ``x`` or the views, so that no call sees the old values.
    """
    before = value.all_input_nodes[0]
    path, parts, views, step = list[Any](), {value}, [before], value
    while step.target in _VIEWS:
        path.append(_shown(step))
        users = (user for view in views for user in view.users if user.target in _WHERE)
        views = [user for user in users if _shown(user) == path[-1]]
        parts.update(views)
        source: Any = step.args[1]
        if not isinstance(source, torch.fx.Node) or not {*source.args[:1]} <= {*views}:
            break
        if source.target not in (aten.copy.default, *_VIEWS):
            break
        parts.add(source)
        step, source = source, source.args[1]
    mine = {before, *parts} - {value}
    if source in mine or any(user not in parts for node in mine for user in node.users):
        return None
    return Write(value, before, write_to_view, (source, tuple(path)))


def _shown(call: torch.fx.Node) -> tuple[Any, ...]:
    """Return the view that a call makes or replaces, with its arguments; empty for other calls."""
    view = _VIEWS.get(call.target, call.target)
    if view not in _WHERE:
        return ()
    return view, *(_torch.operators.argument(call, each) for each in _WHERE[view])


def _adds(call: torch.fx.Node) -> bool:
    """True if the call adds to the numbers at its places instead of replacing them."""
    return call.target is aten.index_put.default and bool(
        _torch.operators.argument(call, "accumulate")
    )


def _nodes(values: Any) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    map_arg(values, found.add)
    return found


def _memory(value: Any) -> object:
    """Return a key that is equal for values that may share memory."""
    fake = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
        return _torch.tensors.storage_id(fake)
    return object()


def _is_large(placeholder: torch.fx.Node) -> bool:
    value = placeholder.meta["val"]
    if _torch.symbols.is_unbacked(value.numel()):
        return True
    return int(_torch.symbols.hint(value.numel())) * int(value.itemsize) >= _LARGE
