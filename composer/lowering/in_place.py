"""Inputs of which a graph writes a part, as to a cache of keys and values: written in place.

A functional graph makes a new tensor of such an input, which is copied back after the call. Of a
cache all of it moves several times then, for the place of one token. Where nothing else reads what
the input was, torch writes the part into the input itself, and what comes after reads it there.

Without the new tensor nothing but the program's order says what comes before the write. So it waits
for calls that might see it, through an input that turns out to be the same memory, and for calls
that might raise, since then nothing is to be written. The version of the input rises when it is
copied back, onto itself: should an engine fail behind a write, the call is answered for by whoever
writes to the same places.

An engine may also do it: one whose operator copies the input first unless it is given the same
memory for its result, as ONNX Runtime's ``ScatterND``. The graph stays functional then, and is not
cut. What might raise before the write has to come before it by what it reads. Another input that
turns out to be the same memory is found at the call (:mod:`composer.graphs.sharing`): the result is
new then, and copied back. That sees the inputs of one region, so where the graph is cut anyway,
whoever reads an input before the write has to come before it by what it reads, too.

Kin: Inductor's reinplacing pass.
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
"""Operators that put numbers to places of a tensor, to what writes them into the tensor itself."""

_VIEWS: Mapping[Any, Callable[..., Any]] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
"""Operators that replace what a view shows, to the view."""

_WHERE = {
    aten.slice.Tensor: ("dim", "start", "end", "step"),
    aten.select.int: ("dim", "index"),
}
"""The arguments that say what a view shows; those operators have them by the same names."""

_LARGE = 1 << 17
"""Bytes of an input that take as long to move, on two cores, as cutting the graph
(bench/generation.py)."""

_DIVISIONS = frozenset({"aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod"})
"""Element by element, and of integers they may still raise."""

_COPIES = (
    *(aten._to_copy.default, torch.ops.prims.convert_element_type.default),
    *(aten.clone.default, aten.lift_fresh_copy.default),
)

_BY_ENGINE = "composer_written_by_engine"
"""Key of a node's meta: its result may be the memory of its first argument."""


@dataclass(frozen=True, slots=True)
class Write:
    """A call that makes a new tensor of another one, but for some places.

    Attributes:
        call: The call.
        before: What it makes it of, and nothing else reads.
        twin: What writes to ``before`` instead, and returns it.
        args: The further arguments of that.
    """

    call: torch.fx.Node
    before: torch.fx.Node
    twin: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """An input that may be written to.

    Attributes:
        at: Its position.
        is_large: Whether moving it takes longer than cutting the graph.
        writes: The calls that make its new value of it, the last one first.
    """

    at: int
    is_large: bool
    writes: tuple[Write, ...]

    @property
    def calls(self) -> set[torch.fx.Node]:
        """The calls of its writes."""
        return {each.call for each in self.writes}


def writable_inputs(graph: FunctionalGraph) -> list[Written]:
    """The inputs of a graph to which all that it writes can be written in place.

    Args:
        graph: The graph, whose ``written`` says what is copied back.
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
    """Mark the writes that an engine may do, in whatever order it computes the graph.

    They put rows along one dimension of a contiguous input, and all sizes are known.

    Args:
        graph: The graph.
        inputs: Some of its :func:`writable_inputs`.
        writes: Whether the engine can do such a write.
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
            # where one of these raises, all do
            needed |= {call for call, (others, _) in found.items() if others == places}
            if needed.issuperset(noticing):
                node.meta[_BY_ENGINE] = True
                free.append(written)
        if _notices(node, seen, refused):
            noticing.append(node)
    return free


def never(_: torch.fx.Node) -> bool:
    """Of an engine that leaves all writes to torch."""
    return False


def rewritten(gm: torch.fx.GraphModule) -> dict[int, int]:
    """Position of each output that may be the memory of a placeholder, to the placeholder's."""
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    (returned,) = gm.graph.find_nodes(op="output")
    outputs = enumerate(returned.args[0])
    marked = {i: each.args[0] for i, each in outputs if _is_by_engine(each)}
    return {i: inputs[source] for i, source in marked.items() if source in inputs}


def put_in_place(
    graph: FunctionalGraph, inputs: Iterable[Written], refused: Collection[torch.fx.Node]
) -> None:
    """Have torch write to these inputs what the graph was to make new tensors of.

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
    """Have an operator write to a tensor, and return that.

    Its version stays (``data`` has one of its own): AOTAutograd raises it when it copies back.
    ``after`` only makes the call wait.
    """
    operator(x.data, *args)
    return x


def write_to_view(
    x: torch.Tensor, source: torch.Tensor, path: Sequence[Any], *, after: Any = ()
) -> Any:
    """As above, to a view of a view ...; each step is an operator and its arguments."""
    view = x.data
    for operator, *where in path:
        view = operator(view, *where)
    view.copy_(source)
    return x


def _keep_order(
    graph: FunctionalGraph, written: set[torch.fx.Node], refused: Collection[torch.fx.Node]
) -> None:
    """Have each write wait for the one before it, and for what may see it or raise before it."""
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
    """At which places rows are put along one dimension, and its size."""
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
    """Those that are no weights."""
    inputs = enumerate(graph.gm.graph.find_nodes(op="placeholder"))
    return {node for i, node in inputs if i not in graph.weights}


def _may_raise(call: torch.fx.Node, refused: Collection[torch.fx.Node]) -> bool:
    """Whether it might for some inputs: all but what is done element by element, or by engines.

    Those have what raises refused, but for places that are not there, masks of another length and
    assertions. An integer may be divided by zero.
    """
    name, counts = _torch.operators.operator_name(call.target), map(_counts, call.all_input_nodes)
    if name in _DIVISIONS:
        return any(counts)
    if call.target in _COPIES or torch.Tag.pointwise in getattr(call.target, "tags", ()):
        return False
    return call in refused or _torch.operators.has_effect(call.target) or any(counts)


def _counts(node: torch.fx.Node) -> bool:
    """Whether it stands for integers, truth values among them."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _settle(node: torch.fx.Node, settled: set[torch.fx.Node]) -> None:
    """Add a node, and all that it needs."""
    open_ones = [node]
    while open_ones:
        each = open_ones.pop()
        if each not in settled:
            settled.add(each)
            open_ones += each.all_input_nodes


def _notices(
    node: torch.fx.Node, inputs: set[torch.fx.Node], refused: Collection[torch.fx.Node]
) -> bool:
    """Whether it is a call that reads one of these inputs, or might raise."""
    if node.op != "call_function" or is_view(node):
        return False
    return any(_base(each) in inputs for each in node.all_input_nodes) or _may_raise(node, refused)


def _base(node: torch.fx.Node) -> torch.fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _writes_between(source: torch.fx.Node, value: Any) -> tuple[Write, ...]:
    """What makes ``value`` of ``source`` one by one; empty where anything else takes part."""
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
    """``x[0, :, 3:5] = y`` is a chain of views down, a copy, and the same chain up again.

    Functional graphs make the views anew for each step of the way up. They and the steps have to be
    all that reads ``x``: then nobody is there who sees what was there before.
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
    """The view that a call is or replaces, and its arguments; empty for any other call."""
    view = _VIEWS.get(call.target, call.target)
    if view not in _WHERE:
        return ()
    return view, *(_torch.operators.argument(call, each) for each in _WHERE[view])


def _adds(call: torch.fx.Node) -> bool:
    """Whether it reads the numbers that it replaces."""
    return call.target is aten.index_put.default and bool(
        _torch.operators.argument(call, "accumulate")
    )


def _nodes(values: Any) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    map_arg(values, found.add)
    return found


def _memory(value: Any) -> object:
    """Equal for what may share memory."""
    fake = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
        return _torch.tensors.storage_id(fake)
    return object()


def _is_large(placeholder: torch.fx.Node) -> bool:
    value = placeholder.meta["val"]
    if _torch.symbols.is_unbacked(value.numel()):
        return True
    return int(_torch.symbols.hint(value.numel())) * int(value.itemsize) >= _LARGE
