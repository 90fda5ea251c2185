"""Inputs of which a graph writes a part, as to a cache of keys and values: torch writes in place.

A functional graph makes a new tensor of such an input, which is copied back after the call. Of a
cache all of it moves several times then, for the place of one token. Where nothing else reads what
the input was, torch writes the part into the input itself, and what comes after reads it there.

The version of the input rises when it is copied back, onto itself. Until then nothing has happened
that would be in somebody's way: should an engine fail behind a write, whoever runs the graph again
writes to the same places.

Kin: Inductor's reinplacing pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from composer import _torch
from composer.lowering.aot import FunctionalGraph

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

_LEAST = 1 << 17
"""Bytes of an input that is large: on two cores, moving 128 KiB takes as long as cutting the graph
(bench/generation.py)."""


@dataclass(frozen=True, slots=True)
class Write:
    """A call that makes a new tensor of another one, but for some places.

    Attributes:
        call: The call.
        before: What it makes it of, and nothing else reads.
        twin: What writes to ``before`` instead.
        args: The further arguments of that.
        is_large: Whether ``before`` is an input that takes longer to move than to cut the graph.
    """

    call: torch.fx.Node
    before: torch.fx.Node
    twin: Callable[..., Any]
    args: tuple[Any, ...]
    is_large: bool


def writes_to_inputs(graph: FunctionalGraph) -> Iterator[Write]:
    """The calls of a graph that can write to its inputs themselves.

    Args:
        graph: The graph, whose ``written`` says what is copied back.
    """
    inputs = graph.gm.graph.find_nodes(op="placeholder")
    (returned,) = graph.gm.graph.find_nodes(op="output")
    outputs = returned.args[0]
    shared = Counter(map(_memory, outputs))
    for at, i in graph.written.items():
        if shared[_memory(outputs[at])] == 1:  # else a view of it is returned
            yield from _writes_between(inputs[i], outputs[at])


def put_in_place(gm: torch.fx.GraphModule, writes: Iterable[Write]) -> None:
    """Have calls write to what they were to make a new tensor of."""
    for each in writes:
        args: Any = each.before, *each.args
        each.call.target, each.call.args = each.twin, args
    gm.graph.eliminate_dead_code()


def write_by(x: torch.Tensor, operator: Callable[..., Any], *args: Any) -> torch.Tensor:
    """Have an operator write to a tensor, which keeps its version, and return that."""
    operator(x.data, *args)
    return x


def write_to_view(x: torch.Tensor, source: torch.Tensor, path: Sequence[Any]) -> torch.Tensor:
    """As above, to a view of a view ...; each step is an operator and its arguments."""
    view = x.data
    for operator, *where in path:
        view = operator(view, *where)
    view.copy_(source)
    return x


def _writes_between(source: torch.fx.Node, value: Any) -> list[Write]:
    """What makes ``value`` of ``source`` one by one; empty where anything else takes part."""
    found: list[Write] = []
    is_large = _size(source) >= _LEAST
    while value is not source:
        put = _put(value, is_large)
        if put is None:
            return []
        found.append(put)
        value = put.before
    return found


def _put(value: Any, is_large: bool) -> Write | None:
    if not isinstance(value, torch.fx.Node):
        return None
    if value.target in _VIEWS:
        return _put_by_views(value, is_large)
    if value.target not in _TWINS or _adds(value) or value.kwargs:
        return None
    before, *given = value.args
    if not isinstance(before, torch.fx.Node) or before in _nodes(given):
        return None
    if [*before.users] != [value]:
        return None
    return Write(value, before, write_by, (_TWINS[value.target], *given), is_large)


def _put_by_views(value: torch.fx.Node, is_large: bool) -> Write | None:
    """``x[0, :, 3:5] = y`` is a chain of views down, a copy, and the same chain up again.

    Functional graphs make the views anew for each step of the way up.
    """
    before, source = value.args[:2]
    if not isinstance(before, torch.fx.Node):
        return None
    path, level, parts = [_step(value)], [before], {value}
    while True:
        level = [user for node in level for user in node.users if _looks(user, path[-1])]
        parts |= {*level}
        if not isinstance(source, torch.fx.Node) or source.args[:1] not in [(v,) for v in level]:
            break
        if source.target not in (aten.copy.default, *_VIEWS):
            break
        parts.add(source)
        outer, source = source, source.args[1]
        if outer.target is aten.copy.default:
            break
        path.append(_step(outer))
    mine = {before, *parts} - {value}
    if source in mine or any(user not in parts for node in mine for user in node.users):
        return None
    return Write(value, before, write_to_view, (source, tuple(path)), is_large)


def _step(call: torch.fx.Node) -> tuple[Any, ...]:
    """The view of which an operator replaces what it shows, and the view's arguments."""
    names = ("dim", "index") if call.target is aten.select_scatter.default else _OF_SLICES
    return _VIEWS[call.target], *(_torch.argument(call, each) for each in names)


def _looks(call: torch.fx.Node, step: tuple[Any, ...]) -> bool:
    """Whether a call is that view."""
    names = ("dim", "index") if call.target is aten.select.int else _OF_SLICES
    target, *given = step
    return call.target is target and [_torch.argument(call, each) for each in names] == given


_OF_SLICES = ("dim", "start", "end", "step")


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


def _size(placeholder: torch.fx.Node) -> int:
    value = placeholder.meta["val"]
    return int(_torch.hint(value.numel())) * int(value.itemsize)
