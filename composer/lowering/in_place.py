"""Inputs of which a graph writes a part, as to a cache of keys and values: torch writes in place.

A functional graph makes a new tensor of such an input, which is copied back after the call. Of a
cache all of it moves several times then, for the place of one token. Where nothing else reads what
the input was, torch writes the part into the input itself, and what comes after reads it there.

Without the new tensor nothing but the program's order says what comes before the write. So it waits
for calls that might see it, through an input that turns out to be the same memory, and for calls
that might raise, since then nothing is to be written. The version of the input rises when it is
copied back, onto itself: should an engine fail behind a write, the call is answered for by whoever
writes to the same places.

Kin: Inductor's reinplacing pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from composer import _torch
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

_INTEGERS = (torch.int64, torch.int32)


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
    """An input that torch may write to.

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


def put_in_place(graph: FunctionalGraph, inputs: Iterable[Written]) -> None:
    """Have torch write to these inputs what the graph was to make new tensors of.

    Args:
        graph: The graph, which is changed.
        inputs: Some of its :func:`writable_inputs`.
    """
    written = set[torch.fx.Node]()
    for each in (write for found in inputs for write in found.writes):
        args: Any = each.before, *each.args
        each.call.target, each.call.args = each.twin, args
        written.add(each.call)
    graph.gm.graph.eliminate_dead_code()
    _keep_order(graph, written)


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


def _keep_order(graph: FunctionalGraph, written: set[torch.fx.Node]) -> None:
    """Have each write wait for the one before it, and for what may see it or raise before it."""
    settled, noticing = set[torch.fx.Node](), list[torch.fx.Node]()
    inputs = enumerate(graph.gm.graph.find_nodes(op="placeholder"))
    seen = {node for i, node in inputs if i not in graph.weights}
    for node in list(graph.gm.graph.nodes):
        if node in written:
            _settle(node, settled)
            waits = tuple(each for each in noticing if each not in settled)
            for each in waits:
                _settle(each, settled)
            node.kwargs = {"after": waits} if waits else {}
            noticing = [node]
        elif node.op == "call_function" and not is_view(node) and _notices(node, seen):
            noticing.append(node)


def _settle(node: torch.fx.Node, settled: set[torch.fx.Node]) -> None:
    """Add a node, and all that it needs."""
    open_ones = [node]
    while open_ones:
        each = open_ones.pop()
        if each not in settled:
            settled.add(each)
            open_ones += each.all_input_nodes


def _notices(call: torch.fx.Node, inputs: set[torch.fx.Node]) -> bool:
    """Whether it reads one of these inputs, or a place that might not be there."""
    return any(_base(each) in inputs or _is_place(each) for each in call.all_input_nodes)


def _base(node: torch.fx.Node) -> torch.fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_place(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in _INTEGERS


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
    return view, *(_torch.argument(call, each) for each in _WHERE[view])


def _adds(call: torch.fx.Node) -> bool:
    """Whether it reads the numbers that it replaces."""
    return call.target is aten.index_put.default and bool(_torch.argument(call, "accumulate"))


def _nodes(values: Any) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    map_arg(values, found.add)
    return found


def _memory(value: Any) -> object:
    """Equal for what may share memory."""
    fake = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
        return _torch.storage_id(fake)
    return object()


def _is_large(placeholder: torch.fx.Node) -> bool:
    value = placeholder.meta["val"]
    if _torch.depends_on_data(value.numel()):
        return True
    return int(_torch.hint(value.numel())) * int(value.itemsize) >= _LARGE
