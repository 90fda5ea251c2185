"""Cuts a functional graph into regions that an engine takes and calls that torch runs.

A graph that is taken whole is one region, and torch runs nothing around it. Otherwise torch.fx's
``CapabilityBasedPartitioner`` finds the connected regions, and torch runs the other calls between
them as eager ATen. These are refused operators and returned views: only torch can make a view share
memory as it does in eager mode. A part of the graph that may be computed in low precision
(:mod:`composer.graphs.low_precision`) gets regions of its own.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.fx
from torch.fx.node import map_arg
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from composer import _torch
from composer.errors import refuse
from composer.graphs import low_precision
from composer.graphs.nodes import attribute_at, tensors_of
from composer.lowering import in_place
from composer.lowering.aot import FunctionalGraph, decline_special_tensors
from composer.lowering.constants import evaluate_constants, lift_scalars
from composer.lowering.devices import WHY, elsewhere
from composer.lowering.views import (
    decline_unsure_memory,
    give_returned_views_to_torch,
    is_view,
)
from composer.records import Reason, Status

_PREFIX = "region_"

WHOLE = f"{_PREFIX}0"
"""The name of a region that is the whole graph."""

_CONJUGATING = (torch.ops.aten.linalg_pinv.atol_rtol_tensor,)
"""Kernels of torch that conjugate complex numbers internally.

The conjugation is lost under any ``TorchDispatchMode``, and AOTAutograd runs a first call under
one. To be removed with https://github.com/pytorch/pytorch/issues/198118.
"""

_OF_RNN = (torch.ops.aten.mkldnn_rnn_layer_backward.default,)
"""Operators that read a workspace that AOTAutograd's graphs do not keep.

With another workspace such an operator ends the process. ``aot_eager`` and Inductor raise at the
call (torch 2.13, with Dynamo's ``allow_rnn``).
"""

_COMPUTING_NOTHING = (
    operator.getitem,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_permuted.default,
)
"""Calls that return an existing value, or memory that is not initialized."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a functional graph that one engine takes; a pure function of its placeholders.

    Attributes:
        gm: The part.
        weights: The weights of :class:`FunctionalGraph`, by position among the part's own
            placeholders.
        witnesses: The witnesses of :class:`FunctionalGraph`, by the same positions.
        constants: Tensors that the graph held itself, by the position of the placeholder that
            replaces each. Constants after the last argument need not be passed at a call.
        rewritten: Position of each output that the engine may write to the memory of an input,
            mapped to the input's (:func:`~composer.lowering.in_place.leave_to_engine`).
    """

    gm: torch.fx.GraphModule
    weights: dict[int, torch.Tensor]
    witnesses: dict[int, torch.Tensor]
    constants: dict[int, torch.Tensor]
    rewritten: dict[int, int] = field(default_factory=dict)

    @property
    def is_low_precision(self) -> bool:
        """True if the region may be computed in low precision."""
        return bool(low_precision.marked(self.gm.graph))

    @property
    def input_dtypes(self) -> tuple[torch.dtype | None, ...]:
        """The dtype of each placeholder; ``None`` for an integer."""
        values = (node.meta["val"] for node in self.gm.graph.find_nodes(op="placeholder"))
        return tuple(each.dtype if isinstance(each, torch.Tensor) else None for each in values)


@dataclass(frozen=True, slots=True)
class Split:
    """A functional graph, cut into regions for an engine and calls for torch.

    Attributes:
        outer: The graph that calls the regions by name; ``None`` where a single region is the whole
            graph.
        regions: The regions that the engine takes, by name.
        taken: Number of the graph's compute nodes that are in the regions.
        total: Number of the graph's compute nodes.
        left: One line for each operator that is outside of the regions: the reason, and the place
            in the user's code.
        written: Positions of the inputs that are written to in place, by torch between the
            regions or by the engine.
    """

    outer: torch.fx.GraphModule | None
    regions: dict[str, Region]
    taken: int
    total: int
    left: tuple[str, ...]
    written: tuple[int, ...] = ()

    def decline_if_empty(self) -> None:
        """Refuse where there is no region for an engine.

        Raises:
            Refusal: ``declined``, with ``unsupported_dtype`` if every compute node uses complex
                numbers, otherwise with ``unsupported_op``.
        """
        if not self.regions:
            why = f"nothing can be taken: {', '.join(self.left)}" if self.left else None
            assert self.outer is not None
            compute = [node for node in calls_of(self.outer) if is_compute(node)]
            by_dtype = bool(compute) and all(map(is_complex, compute))
            reason = Reason.UNSUPPORTED_DTYPE if by_dtype else Reason.UNSUPPORTED_OP
            refuse(Status.DECLINED, reason, why or "the graph computes nothing")

    def assemble(self, engines: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        """Return the whole graph as a callable; the engine of a region's name runs the region."""
        if self.outer is None:
            (engine,) = engines.values()
            return engine
        for name, engine in engines.items():
            delattr(self.outer, name)  # a plain attribute is called without torch.nn.Module's cost
            setattr(self.outer, name, engine)
        return _torch.sources.settled_forward(self.outer)


def split(
    graph: FunctionalGraph,
    why_not: Callable[[torch.fx.Node], str | None],
    *,
    writes: Callable[[torch.fx.Node], bool] = in_place.never,
) -> Split:
    """Cut a functional graph into regions for an engine and calls for torch.

    Args:
        graph: The graph. It is changed.
        why_not: Returns why the engine cannot take a call; ``None`` if it can.
        writes: Returns True if the engine can do a call that writes rows in place.

    Raises:
        Refusal: ``declined``, where a value is not a plain dense tensor, where torch itself cannot
            run a call of the graph, or where outputs share memory in a way that cannot be
            reproduced.
    """
    gm = graph.gm
    for node in gm.graph.nodes:
        decline_special_tensors(each for each in tensors_of(node) if not each.dtype.is_complex)
        _decline_broken(node)
    decline_unsure_memory(gm)
    lift_scalars(gm)
    evaluate_constants(gm, lambda node: why_not(node) is not None)
    away = dict.fromkeys(elsewhere(gm, graph.device), WHY)
    refused = {node: why for node in calls_of(gm) if (why := why_not(node) or away.get(node))}
    by_engine, by_torch = _written_in_place(graph, refused, writes)
    written = tuple(each.at for each in (*by_engine, *by_torch))
    torchs = {call for each in by_torch for call in each.calls}
    refused |= dict.fromkeys(torchs, in_place.WHY)
    left = _described(filter(is_compute, refused), refused)  # before the calls are changed
    in_place.put_in_place(graph, by_torch, refused)
    refused = {node: refused[node] for node in calls_of(gm) if node in refused}
    compute = [node for node in calls_of(gm) if is_compute(node) and node not in torchs]
    taken = [node for node in compute if node not in refused]
    if not taken:
        gm.recompile()
        return Split(gm, {}, 0, len(compute), left)
    outside = {*_in_order(gm, refused), *give_returned_views_to_torch(gm)}
    outside |= {node for node in calls_of(gm) if _is_made_for(outside, node)}
    low = low_precision.marked(gm.graph)
    if not outside and not low and _returns_computed_values(gm):
        rewritten = in_place.rewritten(gm)
        region = Region(gm, graph.weights, graph.witnesses, _lift_constants(gm), rewritten)
        return Split(None, {WHOLE: region}, len(taken), len(compute), left, written)
    calls = {*calls_of(gm)}
    groups = [group for group in (calls - low, calls & low) if group]
    taken_nodes = [part for group in groups for part in _partition(gm, outside | (calls - group))]
    regions = _fuse(graph, taken_nodes)
    inside = sum(is_compute(node) for nodes in taken_nodes for node in nodes)
    return Split(gm, regions, inside, len(compute), left, written)


def _written_in_place(
    graph: FunctionalGraph,
    refused: Mapping[torch.fx.Node, str],
    writes: Callable[[torch.fx.Node], bool],
) -> tuple[list[in_place.Written], list[in_place.Written]]:
    """Return the inputs that the engine writes to in place, and those that torch writes to.

    Torch writes to an input if one of the writes is refused. It also writes to large inputs,
    since the copies would take longer than cutting the graph. A large input stays with the engine
    if the engine would otherwise have nothing to compute.
    """
    found = in_place.writable_inputs(graph)
    free = [each for each in found if each.calls.isdisjoint(refused)]
    by_engine = in_place.leave_to_engine(graph, free, writes, refused)
    others = [each for each in found if each not in by_engine]
    left = refused.keys() | {call for each in others for call in each.calls}
    is_worth = any(is_compute(node) and node not in left for node in calls_of(graph.gm))
    by_torch = [each for each in others if each not in free or (each.is_large and is_worth)]
    return by_engine, by_torch


def is_compute(node: torch.fx.Node) -> bool:
    """True if the node computes new tensors: no view, no arithmetic on sizes, no assertion."""
    if node.op != "call_function" or node.target in _COMPUTING_NOTHING or is_view(node):
        return False
    return draws(node) or any(True for _ in tensors_of(node))


def is_complex(node: torch.fx.Node) -> bool:
    """True if a call reads or returns complex numbers."""
    return any(each.dtype.is_complex for each in seen_by(node))


def seen_by(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call reads and returns."""
    for each in (*node.all_input_nodes, node):
        yield from tensors_of(each)


def alone(node: torch.fx.Node) -> Region:
    """Return one call as a region of its own, with a placeholder for each of its operands.

    The names of the placeholders do not depend on the graph that the call is from. So an answer
    about this region holds for every call that is like it.
    """
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for index, source in enumerate(node.all_input_nodes):
        copies[source] = graph.placeholder(f"arg{index}")
        copies[source].meta["val"] = source.meta["val"]
    parts = [user for user in node.users if user.target is operator.getitem]
    for each in (node, *parts):
        args, kwargs = map_arg((each.args, each.kwargs), copies.__getitem__)
        copies[each] = graph.call_function(cast(Any, each.target), args, kwargs)
        copies[each].meta.update(each.meta)
    graph.output(tuple(copies[each] for each in parts or (node,)))
    return Region(torch.fx.GraphModule(torch.nn.Module(), graph), {}, {}, {})


def calls_of(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes that call a function."""
    return (node for node in gm.graph.nodes if node.op == "call_function")


def _decline_broken(node: torch.fx.Node) -> None:
    """Refuse a graph with a call that torch itself cannot run correctly in a compiled graph."""
    if node.target in _CONJUGATING and is_complex(node):
        what = f"{node.target} of complex numbers is wrong in torch itself, when compiled"
        refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, what + source_line(node))
    if node.target in _OF_RNN:
        what = f"{node.target} has no workspace in torch itself, when compiled"
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, what + source_line(node))


def _in_order(gm: torch.fx.GraphModule, refused: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return the refused nodes, and make each node that draws random numbers wait for the last.

    Cutting out regions may move a node that depends on no other node. But a random number depends
    on how many were drawn before it.
    """
    kept: list[torch.fx.Node] = []
    before: torch.fx.Node | None = None
    for node in refused:
        if not draws(node):
            kept.append(node)
            continue
        if before is not None:
            with gm.graph.inserting_before(node):
                args: Any = (before, node.target, *node.args)
                waiting = gm.graph.call_function(call_after, args, node.kwargs)
            waiting.meta = node.meta
            node.replace_all_uses_with(waiting)
            gm.graph.erase_node(node)
            node = waiting
        kept.append(node)
        before = node
    return kept


def _is_made_for(outside: set[torch.fx.Node], node: torch.fx.Node) -> bool:
    """True if a call reads no tensor, and all its users are outside of the regions."""
    reads = any(True for each in node.all_input_nodes for _ in tensors_of(each))
    return not reads and bool(node.users) and not node.users.keys() - outside


def draws(node: torch.fx.Node) -> bool:
    """True if a call draws random numbers from torch's generator.

    Torch marks attention as drawing, because of its dropout, but the dropout is mostly zero. The
    partitioner passes an operator that a checkpoint repeats as an argument to
    ``run_and_save_rng_state``, and in the backward to ``run_with_rng_state``. A branch or a loop
    draws if a node of its graphs draws.
    """
    if _torch.operators.draws(node.target):
        return bool(_torch.operators.argument(node, "dropout_p") != 0.0)
    return any(map(_torch.operators.draws, node.args)) or any(map(draws, _within(node)))


def _within(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the nodes of the graphs that a call has as operands."""
    owner = node.graph.owning_module
    for each in node.all_input_nodes:
        value = attribute_at(owner, str(each.target)) if owner and each.op == "get_attr" else None
        if isinstance(value, torch.fx.GraphModule):
            yield from value.graph.nodes


def call_after(_: object, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``. The first argument is not used: it only makes the call wait."""
    return function(*args, **kwargs)


def _returns_computed_values(gm: torch.fx.GraphModule) -> bool:
    """True if every output is the result of a call, and no result is returned twice."""
    (returned,) = gm.graph.find_nodes(op="output")
    nodes = [n for n in returned.args[0] if isinstance(n, torch.fx.Node)]
    computed = all(node.op == "call_function" for node in nodes)
    return computed and len(set(nodes)) == len(returned.args[0])


def _partition(
    gm: torch.fx.GraphModule, outside: set[torch.fx.Node]
) -> list[dict[torch.fx.Node, Any]]:
    """Return the nodes of each region, without the regions that compute nothing."""

    def taken(_: object, node: torch.fx.Node) -> bool:
        of = node.args[0] if node.target is operator.getitem else node
        return node.op == "call_function" and not {node, of} & outside

    nodes = [node for node in gm.graph.nodes if taken(gm, node)]
    if all(user.op == "output" or user in outside for node in outside for user in node.users):
        regions = [dict.fromkeys(nodes)]  # only the tail is torch's: there is no cut to find
    else:
        support = create_op_support(taken)
        partitioner = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True)
        regions = [partition.nodes for partition in partitioner.propose_partitions()]
    return [region for region in regions if any(map(is_compute, region))]


def _fuse(graph: FunctionalGraph, parts: Sequence[dict[torch.fx.Node, Any]]) -> dict[str, Region]:
    """Replace the nodes of each part by one call, and return the parts as graphs of their own."""
    gm = graph.gm
    # By name, since fuse_by_partitions() creates every node of the graph again (torch 2.13).
    position = {node.target: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    fuse_by_partitions(gm, list(parts), prefix=_PREFIX, always_return_tuple=True)
    gm.recompile()
    regions: dict[str, Region] = {}
    for call in gm.graph.find_nodes(op="call_module"):
        inputs = ((i, arg) for i, arg in enumerate(call.args) if arg.op == "placeholder")
        given = {i: position[arg.target] for i, arg in inputs}
        held = {i: arg for i, arg in enumerate(call.args) if arg.op == "get_attr"}
        region = gm.get_submodule(call.target)
        assert isinstance(region, torch.fx.GraphModule)
        regions[call.target] = Region(
            region,
            weights={i: graph.weights[p] for i, p in given.items() if p in graph.weights},
            witnesses={i: graph.witnesses[p] for i, p in given.items() if p in graph.witnesses},
            constants={i: constant_at(gm, node) for i, node in held.items()},
            rewritten=in_place.rewritten(region),
        )
    return regions


def _lift_constants(gm: torch.fx.GraphModule) -> dict[int, torch.Tensor]:
    """Replace tensors that the graph holds itself by new placeholders after all others."""
    constants: dict[int, torch.Tensor] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in gm.graph.find_nodes(op="get_attr"):
        first = next(iter(gm.graph.nodes))
        after = gm.graph.inserting_after(placeholders[-1]) if placeholders else None
        with after or gm.graph.inserting_before(first):
            lifted = gm.graph.placeholder(node.name)
        lifted.meta.update(node.meta)
        constants[len(placeholders)] = constant_at(gm, node)
        placeholders.append(lifted)
        node.replace_all_uses_with(lifted)
        gm.graph.erase_node(node)
    return constants


def constant_at(gm: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor:
    """Return the tensor that a ``get_attr`` node reads."""
    return cast(torch.Tensor, attribute_at(gm, str(node.target)))


def _described(
    nodes: Iterable[torch.fx.Node], refused: Mapping[torch.fx.Node, str]
) -> tuple[str, ...]:
    """Return one line for each operator and reason, with the first place in the user's code."""
    lines: dict[str, str] = {}
    for node in nodes:
        lines.setdefault(f"{node.target} ({refused[node]})", source_line(node))
    return tuple(f"{what}{place}" for what, place in sorted(lines.items()))


def source_line(node: torch.fx.Node) -> str:
    """Return ``" at file:line"`` in the user's code for a node; empty if it is not known."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" at {places[-1][0]}:{places[-1][1]}" if places else ""
