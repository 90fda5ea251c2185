"""Cuts a functional graph into regions that an engine takes and calls that torch runs.

A graph that is taken whole is one region, and torch runs nothing around it. Otherwise torch.fx's
``CapabilityBasedPartitioner`` finds the connected regions, and torch runs the other calls between
them as eager ATen. These are refused operators and returned views: only torch can make a view share
memory as it does in eager mode. A part of the graph that may be computed in low precision
(:mod:`composer.graphs.low_precision`) gets regions of its own.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from composer.graphs.nodes import attribute_at, call_behind, calls_of, graphs_in, tensors_of
from composer.lowering import in_place
from composer.lowering.aot import FunctionalGraph, decline_special_tensors
from composer.lowering.constants import evaluate_constants, lift_scalars
from composer.lowering.devices import WHY, elsewhere
from composer.lowering.operators.entry import Rule, operands_of
from composer.lowering.partition.work import work_of
from composer.lowering.views import decline_unsure_memory, give_returned_views_to_torch, is_view
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

With another workspace such an operator ends the process (torch 2.13, with Dynamo's ``allow_rnn``).
To be removed with https://github.com/pytorch/pytorch/pull/185163.
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
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        return tuple(getattr(node.meta["val"], "dtype", None) for node in placeholders)


@dataclass(frozen=True, slots=True)
class Split:
    """A functional graph, cut into regions for an engine and calls for torch.

    Attributes:
        outer: The graph that calls the regions by name; ``None`` where a single region is the whole
            graph.
        regions: The regions that the engine takes, by name.
        taken: The work (:func:`work_of`) of the compute nodes that are in the regions.
        total: The work of all compute nodes of the graph.
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
        if self.regions:
            return
        if not self.left:
            refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, "the graph computes nothing")
        assert self.outer is not None
        compute = [*filter(is_compute, calls_of(self.outer))]
        is_by_dtype = bool(compute) and all(map(is_complex, compute))
        reason = Reason.UNSUPPORTED_DTYPE if is_by_dtype else Reason.UNSUPPORTED_OP
        refuse(Status.DECLINED, reason, f"nothing can be taken: {', '.join(self.left)}")

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
    why_not: Rule,
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
    _decline_impossible(gm)
    lift_scalars(gm)
    evaluate_constants(gm, lambda node: why_not(node) is not None)
    refused = _refused_calls(graph, why_not)
    by_engine, by_torch = _divide_writes(graph, refused, writes)
    written = tuple(each.at for each in (*by_engine, *by_torch))
    writes_of_torch = set[torch.fx.Node]().union(*(each.calls for each in by_torch))
    refused |= dict.fromkeys(writes_of_torch, in_place.WHY)
    left = _described(filter(is_compute, refused), refused)  # before the calls are changed
    in_place.put_in_place(graph, by_torch, refused)
    compute = {*filter(is_compute, calls_of(gm))} - writes_of_torch
    work = {node: work_of(node) for node in compute}
    total = sum(work.values())
    if compute <= refused.keys():
        gm.recompile()
        return Split(gm, {}, 0, total, left)
    outside = _calls_of_torch(gm, refused)
    low = low_precision.marked(gm.graph)
    if not outside and not low and _returns_computed_values(gm):
        rewritten = in_place.rewritten(gm)
        region = Region(gm, graph.weights, graph.witnesses, _lift_constants(gm), rewritten)
        return Split(None, {WHOLE: region}, total, total, left, written)
    calls = {*calls_of(gm)}
    parts = _partition(gm, outside | low) + _partition(gm, outside | (calls - low))
    taken = sum(work.get(node, 0) for node in itertools.chain.from_iterable(parts))
    return Split(gm, _fuse(graph, parts), taken, total, left, written)


def _decline_impossible(gm: torch.fx.GraphModule) -> None:
    """Refuse values that engines do not read, and calls that torch itself cannot run here."""
    for node in gm.graph.nodes:
        decline_special_tensors(each for each in tensors_of(node) if not each.dtype.is_complex)
        _decline_broken(node)
    decline_unsure_memory(gm)


def _refused_calls(graph: FunctionalGraph, why_not: Rule) -> dict[torch.fx.Node, str]:
    """Return the calls that the engine cannot take, with the reasons."""
    foreign = elsewhere(graph.gm, graph.device)
    refused: dict[torch.fx.Node, str] = {}
    for node in calls_of(graph.gm):
        why = why_not(node)
        if why is not None:
            refused[node] = why
        elif node in foreign:
            refused[node] = WHY
    return refused


def _divide_writes(
    graph: FunctionalGraph,
    refused: Mapping[torch.fx.Node, str],
    writes: Callable[[torch.fx.Node], bool],
) -> tuple[list[in_place.Written], list[in_place.Written]]:
    """Return the inputs that the engine writes to in place, and those that torch writes to.

    Torch writes to an input if one of the writes is refused. It also writes to large inputs,
    since the copies would take longer than cutting the graph. A large input stays with the engine
    if the engine would otherwise have nothing to compute.
    """
    by_torch, free = list[in_place.Written](), list[in_place.Written]()
    for written in in_place.writable_inputs(graph):
        is_free = written.calls.isdisjoint(refused)
        (free if is_free else by_torch).append(written)
    by_engine = in_place.leave_to_engine(graph, free, writes, refused)
    copied = [written for written in free if written not in by_engine]
    compute = {*filter(is_compute, calls_of(graph.gm))}
    if compute.difference(refused, *(written.calls for written in (*by_torch, *copied))):
        by_torch += [written for written in copied if written.is_large]
    return by_engine, by_torch


def _calls_of_torch(
    gm: torch.fx.GraphModule, refused: Collection[torch.fx.Node]
) -> set[torch.fx.Node]:
    """Return the calls that are in no region, after views and random draws got their own nodes."""
    left = [node for node in calls_of(gm) if node in refused]
    outside = {*_in_order(gm, left), *give_returned_views_to_torch(gm)}
    return outside.union(node for node in calls_of(gm) if _is_made_for(outside, node))


def is_compute(node: torch.fx.Node) -> bool:
    """True if a call computes new tensors: no view, no arithmetic on sizes, no assertion."""
    if node.target in _COMPUTING_NOTHING or is_view(node):
        return False
    return draws(node) or bool([*tensors_of(node)])


def is_complex(node: torch.fx.Node) -> bool:
    """True if a call reads or returns complex numbers."""
    return any(each.dtype.is_complex for each in seen_by(node))


def seen_by(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """Return the tensors that a call reads and returns."""
    return itertools.chain(operands_of(node), tensors_of(node))


def dtypes_of(node: torch.fx.Node) -> frozenset[torch.dtype]:
    """Return the dtypes of a call's operands and results."""
    return frozenset(each.dtype for each in seen_by(node))


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of these dtypes, for messages."""
    names = {str(each).removeprefix("torch.") for each in dtypes}
    return ", ".join(sorted(names))


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
    items = [user for user in node.users if user.target is operator.getitem]
    for call in (node, *items):
        args, kwargs = map_arg((call.args, call.kwargs), copies.__getitem__)
        copies[call] = graph.call_function(cast(Any, call.target), args, kwargs)
        copies[call].meta.update(call.meta)
    results = items or [node]
    graph.output(tuple(map(copies.__getitem__, results)))
    return Region(torch.fx.GraphModule(torch.nn.Module(), graph), {}, {}, {})


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
    ordered: list[torch.fx.Node] = []
    before: torch.fx.Node | None = None
    for node in refused:
        if draws(node):
            before = node = _let_wait(node, before) if before else node
        ordered.append(node)
    return ordered


def _let_wait(node: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
    """Replace a call by one that waits for the result of another, and return the new call."""
    with node.graph.inserting_before(node):
        args: Any = (before, node.target, *node.args)
        waiting = node.graph.call_function(call_after, args, node.kwargs)
    waiting.meta = node.meta
    node.replace_all_uses_with(waiting)
    node.graph.erase_node(node)
    return waiting


def _is_made_for(outside: set[torch.fx.Node], node: torch.fx.Node) -> bool:
    """True if a call reads no tensor, and all its users are outside of the regions."""
    operands = [*operands_of(node)]
    return not operands and bool(node.users) and node.users.keys() <= outside


def draws(node: torch.fx.Node) -> bool:
    """True if a call draws random numbers from torch's generator.

    Torch marks attention as drawing, because of its dropout, but the dropout is mostly zero. The
    partitioner passes an operator that a checkpoint repeats as an argument to
    ``run_and_save_rng_state``, and in the backward to ``run_with_rng_state``. A branch or a loop
    draws if a node of its graphs draws.
    """
    if _torch.operators.draws(node.target):
        return bool(_torch.operators.argument(node, "dropout_p") != 0.0)
    repeats_a_draw = any(map(_torch.operators.draws, node.args))
    nodes = itertools.chain.from_iterable(gm.graph.nodes for gm in graphs_in(node))
    return repeats_a_draw or any(map(draws, nodes))


def call_after(_: object, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``. The first argument is not used: it only makes the call wait."""
    return function(*args, **kwargs)


def _returns_computed_values(gm: torch.fx.GraphModule) -> bool:
    """True if every output is the result of a call, and no result is returned twice."""
    (returned,) = gm.graph.find_nodes(op="output")
    computed = {*calls_of(gm)}.intersection(returned.all_input_nodes)
    return len(computed) == len(returned.args[0])


def _partition(
    gm: torch.fx.GraphModule, outside: set[torch.fx.Node]
) -> list[dict[torch.fx.Node, Any]]:
    """Return the nodes of each region, without the regions that compute nothing."""
    inside = dict.fromkeys(
        node for node in calls_of(gm) if outside.isdisjoint((node, call_behind(node)))
    )
    (returned,) = gm.graph.find_nodes(op="output")
    users = {user for node in outside for user in node.users}
    if users <= outside | {returned}:  # only the tail is torch's: there is no cut to find
        regions = [inside]
    else:
        support = create_op_support(lambda _, node: node in inside)
        partitioner = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True)
        regions = [partition.nodes for partition in partitioner.propose_partitions()]
    return [region for region in regions if any(map(is_compute, region))]


def _fuse(graph: FunctionalGraph, parts: Sequence[dict[torch.fx.Node, Any]]) -> dict[str, Region]:
    """Replace the nodes of each part by one call, and return the parts as graphs of their own."""
    fuse_by_partitions(graph.gm, list(parts), prefix=_PREFIX, always_return_tuple=True)
    graph.gm.recompile()
    return called_regions(graph.gm, graph.weights, graph.witnesses)


def called_regions(
    gm: torch.fx.GraphModule,
    weights: Mapping[int, torch.Tensor],
    witnesses: Mapping[int, torch.Tensor],
) -> dict[str, Region]:
    """Return the regions that a graph calls, by name.

    Args:
        gm: The graph. Its modules are the regions.
        weights: Its weights, by position among its placeholders.
        witnesses: Their witnesses, by the same positions.
    """
    position = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    regions: dict[str, Region] = {}
    for call in gm.graph.find_nodes(op="call_module"):
        region = gm.get_submodule(call.target)
        assert isinstance(region, torch.fx.GraphModule)
        inputs: dict[int, int] = {}
        constants: dict[int, torch.Tensor] = {}
        for index, source in enumerate(call.args):
            if source.op == "placeholder":
                inputs[index] = position[source]
            elif source.op == "get_attr":
                constants[index] = constant_at(gm, source)
        regions[call.target] = Region(
            region,
            weights=_of_inputs(weights, inputs),
            witnesses=_of_inputs(witnesses, inputs),
            constants=constants,
            rewritten=in_place.rewritten(region),
        )
    return regions


def _of_inputs(
    tensors: Mapping[int, torch.Tensor], inputs: Mapping[int, int]
) -> dict[int, torch.Tensor]:
    """Map a region's positions to tensors, from the graph's positions that they stand for."""
    return {i: tensors[position] for i, position in inputs.items() if position in tensors}


def _lift_constants(gm: torch.fx.GraphModule) -> dict[int, torch.Tensor]:
    """Replace tensors that the graph holds itself by new placeholders after all others."""
    constants: dict[int, torch.Tensor] = {}
    inputs = gm.graph.find_nodes(op="placeholder")
    for index, node in enumerate(gm.graph.find_nodes(op="get_attr"), len(inputs)):
        after_inputs = next(each for each in gm.graph.nodes if each.op != "placeholder")
        with gm.graph.inserting_before(after_inputs):
            lifted = gm.graph.placeholder(node.name)
        lifted.meta.update(node.meta)
        constants[index] = constant_at(gm, node)
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
    return tuple(f"{line}{place}" for line, place in sorted(lines.items()))


def source_line(node: torch.fx.Node) -> str:
    """Return ``" at file:line"`` in the user's code for a node; empty if it is not known."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" at {places[-1][0]}:{places[-1][1]}" if places else ""
