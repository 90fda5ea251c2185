"""Finds the regions that an engine takes by trial: it is asked to read and to load each of them.

Torch runs the nodes that the engine refuses. The graph is then cut again, and the engine is asked
about the new regions, until it takes all of them. If an engine refuses a region without naming a
node, each call of the region is asked about by itself, which takes some milliseconds a call.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.fx

from composer.build import Artefacts
from composer.errors import Refusal, first_line, refuse
from composer.graphs import clones
from composer.graphs.keys import graph_key
from composer.graphs.nodes import calls_of
from composer.lowering.aot import FunctionalGraph
from composer.lowering.engine import ModelRefused, NodesRefused, OnnxBuild, OnnxRegion, S
from composer.lowering.export.onnx import Output, to_onnx
from composer.lowering.export.origins import mark_origins, origin_of, origins_of
from composer.lowering.loaded import BoundRegion, Loaded, Run
from composer.lowering.partition.regions import Region, Split, alone, split
from composer.lowering.partition.tables import table_sizes
from composer.records import Reason, Status

if TYPE_CHECKING:
    from composer.backends.onnx_engine import OnnxEngine

T = TypeVar("T")

Refused = dict[str, str]
"""The reason for each refused node, by the node's name in the functional graph."""

_ROUNDS = 8
"""Number of times that a graph is cut: one refused node may hide others that are refused."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A graph cut into regions, each with its model and loaded into the engine, by name."""

    parts: Split
    models: dict[str, OnnxRegion]
    engines: dict[str, BoundRegion]


def partition_by_trial(
    graph: FunctionalGraph, engine: OnnxEngine[S], build: OnnxBuild[S]
) -> Partition:
    """Cut a functional graph so that an engine takes the whole of every region.

    Args:
        graph: The graph; it is not changed.
        engine: The engine.
        build: The terms of the build.

    Raises:
        Refusal: a region is refused although each of its calls is taken by itself, or nodes are
            still refused after the last round.
    """
    mark_origins(graph.gm)
    refused: dict[str, str] = {}
    steps = _Steps(graph, engine, build)

    def why(node: torch.fx.Node) -> str | None:
        return refused.get(origin_of(node)) or engine.why_not(node, build)

    for _ in range(_ROUNDS):
        fresh = dataclasses.replace(graph, gm=clones.clone_graph(graph.gm))
        parts = split(fresh, why, writes=lambda node: engine.writes(node, build))
        models, newly = steps.each(parts.regions, steps.read, steps.read_alone)
        if not newly:
            load = functools.partial(steps.load, models)
            engines, newly = steps.each(parts.regions, load, steps.load_alone)
            if not newly:
                return Partition(parts, models, engines)
        refused |= newly
    what = f"{engine.title} still refuses {', '.join(newly)} after {_ROUNDS} rounds"
    raise Refusal(Status.DECLINED, Reason.UNSUPPORTED_OP, what)


def bind(
    region: Region, model: OnnxRegion, engine: OnnxEngine[S], build: OnnxBuild[S]
) -> BoundRegion:
    """Load a region into an engine, with its weights taken in by address."""
    now = build.without_weights()

    def load(values: Mapping[int, torch.Tensor]) -> Loaded:
        names = model.graph.inputs
        weights = {names[i]: each.detach().contiguous() for i, each in values.items()}
        loaded = engine.load(model, weights, now)
        return dataclasses.replace(loaded, run=_returning(loaded.run, model.graph.outputs))

    bound = BoundRegion(region, load)
    now = build.at_a_call()
    return bound


def _returning(run: Run, outputs: Sequence[Output]) -> Run:
    """Return a function that turns the model's outputs into the region's."""
    if all(each.is_as_returned for each in outputs):
        return run
    receivers = [each.receiver() for each in outputs]

    def run_and_receive(args: tuple[Any, ...]) -> list[Any]:
        results = run(args)
        return [receive(each) for receive, each in zip(receivers, results, strict=True)]

    return run_and_receive


class _Steps(Generic[S]):
    """Reads and loads the regions of a graph, and finds the calls that are refused.

    Args:
        graph: The functional graph.
        engine: The engine that is asked.
        build: The terms of the build.
    """

    def __init__(self, graph: FunctionalGraph, engine: OnnxEngine[S], build: OnnxBuild[S]) -> None:
        self._graph = graph
        self._engine = engine
        self._build = build
        self._alone: dict[tuple[str, str], str | None] = {}

    def each(
        self,
        regions: Mapping[str, Region],
        step: Callable[[str, Region], T],
        step_alone: Callable[[Region], object],
    ) -> tuple[dict[str, T], Refused]:
        """Take a step for each region; return the results, and the refused nodes with reasons.

        Regions in low precision come last, so that the record shows their facts.
        """
        results: dict[str, T] = {}
        refused: Refused = {}
        for name in sorted(regions, key=lambda name: regions[name].is_low_precision):
            self._build.terms.check_time()
            try:
                results[name] = step(name, regions[name])
            except NodesRefused as why:
                refused |= _origins_of_refused(why, regions[name])
            except Refusal as refusal:
                refused |= self._refused_alone(regions[name], step_alone, refusal)
        return results, refused

    def read(self, _: str, region: Region) -> OnnxRegion:
        """Return the model of a region, which the engine has read."""
        return self._read(region, self._build.terms.artefacts)

    def read_alone(self, region: Region) -> OnnxRegion:
        """Return the model of a single call. It is neither kept on disk nor shared."""
        return self._read(region, Artefacts(0.0))

    def load(self, models: Mapping[str, OnnxRegion], name: str, region: Region) -> BoundRegion:
        """Return a region, loaded into the engine."""
        return bind(region, models[name], self._engine, self._build)

    def load_alone(self, region: Region) -> BoundRegion:
        """Return a single call, loaded into the engine."""
        return bind(region, self.read_alone(region), self._engine, self._build)

    def _read(self, region: Region, models: Artefacts) -> OnnxRegion:
        tables = table_sizes(region.gm)
        keeps_float32 = self._build.is_mixed and not region.is_low_precision
        self._engine.prepare(region.gm, self._build)
        graph = to_onnx(region, models)
        model = OnnxRegion.of(graph, region, tables, keeps_float32=keeps_float32)
        return dataclasses.replace(model, read=self._engine.read(model, region, self._build))

    def _refused_alone(
        self, region: Region, step: Callable[[Region], object], refusal: Refusal
    ) -> Refused:
        """Return the calls of a refused region that are refused by themselves, with the reasons.

        Raises:
            Refusal: the refusal of the region, if no call of it is refused.
        """
        names = {*origins_of(region.gm).values()}
        refused: Refused = {}
        if isinstance(refusal, ModelRefused) or refusal.reason is Reason.EXPORT_FAILED:
            for node in calls_of(self._graph.gm):
                why = None
                if node.name in names and node.target is not operator.getitem:
                    why = self._why_alone(node, step)
                if why is not None:
                    refused[node.name] = why
        if not refused:
            raise refusal
        return refused

    def _why_alone(self, node: torch.fx.Node, step: Callable[[Region], object]) -> str | None:
        """Return why a call is refused as a region of its own; ``None`` if it is taken."""
        region = alone(node)
        key = (step.__name__, graph_key(region.gm))
        if key not in self._alone:
            self._build.terms.check_time()
            self._alone[key] = None
            try:
                step(region)
            except NodesRefused as why:
                self._alone[key] = str(why)
            except ModelRefused as refusal:
                self._alone[key] = self._engine.described(refusal, node)
            except Refusal as refusal:
                if refusal.reason is not Reason.EXPORT_FAILED:
                    raise
                self._alone[key] = f"the exporter fails: {first_line(str(refusal))}"
        return self._alone[key]


def _origins_of_refused(why: NodesRefused, region: Region) -> Refused:
    """Return the reasons of an engine's refusals, by the names of the functional graph's nodes.

    Raises:
        Refusal: ``declined``, where none of the refused nodes comes from a node of the graph.
    """
    origins = origins_of(region.gm)
    refused: Refused = {}
    for index, reason in why.reasons.items():
        name = why.plain.graph.node_of(why.plain.origins[index] or "")
        if name in origins:
            refused[origins[name]] = reason
    if not refused:
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, str(why))
    return refused
