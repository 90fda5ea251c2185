"""Finds the regions that an engine takes by trial: the engine's own model reader is asked.

Torch runs the nodes that the reader refuses. The graph is then cut again, and the reader is asked
about the new regions, until it takes all of them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.fx

from composer.errors import Refusal, refuse
from composer.graphs import clones
from composer.graphs.nodes import calls_of
from composer.lowering import in_place
from composer.lowering.aot import FunctionalGraph
from composer.lowering.export.origins import mark_origins, origin_of, origins_of
from composer.lowering.export.plain import PlainOnnx
from composer.lowering.operators.entry import Rule
from composer.lowering.partition.regions import Region, Split, split
from composer.records import Reason, Status

M = TypeVar("M")

Read = Callable[[Region], tuple[M | None, dict[str, str]]]
"""Returns the engine's model of a region, and an empty dict.

If nodes are refused: ``None``, and the reasons, by the nodes' names in the functional graph.
"""

_ROUNDS = 8
"""Number of times that a graph is cut: one refused node may hide others that are refused."""


@dataclass(frozen=True, slots=True)
class Partition(Generic[M]):
    """A graph cut into regions, and the reader's model of each, by the region's name."""

    parts: Split
    models: dict[str, M]


def partition_by_trial(
    graph: FunctionalGraph,
    reader: str,
    why_not: Rule,
    read: Read[M],
    *,
    writes: Callable[[torch.fx.Node], bool] = in_place.never,
) -> Partition[M]:
    """Cut a functional graph so that an engine's reader takes the whole of every region.

    Args:
        graph: The graph; it is not changed.
        reader: What the reader is called, for messages.
        why_not: Returns why a call is left to torch without asking the reader; ``None`` if the
            reader is asked.
        read: Reads a region.
        writes: Returns True if the engine can do a call that writes rows in place.

    Raises:
        Refusal: ``declined``, where a node is still refused after the last round.
    """
    mark_origins(graph.gm)
    refused: dict[str, str] = {}

    def why(node: torch.fx.Node) -> str | None:
        return refused.get(origin_of(node)) or why_not(node)

    for _ in range(_ROUNDS):
        fresh = dataclasses.replace(graph, gm=clones.clone_graph(graph.gm))
        parts = split(fresh, why, writes=writes)
        models: dict[str, M] = {}
        newly: dict[str, str] = {}
        for name, region in parts.regions.items():
            model, reasons = read(region)
            if model is not None:
                models[name] = model
            newly |= reasons
        if not newly:
            return Partition(parts, models)
        refused |= newly
    what = f"{reader} still refuses {', '.join(newly)} after {_ROUNDS} rounds"
    raise Refusal(Status.DECLINED, Reason.UNSUPPORTED_OP, what)


def asking_each_call(
    graph: FunctionalGraph,
    read: Read[M],
    reasons: Collection[Reason],
    why_alone: Rule,
) -> Read[M]:
    """Extend ``read``: where a region is refused whole, ask about each of its calls alone.

    Args:
        graph: The graph.
        read: Reads a region.
        reasons: The reasons of a refusal that a single call may cause.
        why_alone: Returns why a call is refused as a region of its own; ``None`` if it is taken.
    """

    def read_or_ask(region: Region) -> tuple[M | None, dict[str, str]]:
        names = {*origins_of(region.gm).values()}
        try:
            return read(region)
        except Refusal as refusal:
            if refusal.reason not in reasons:
                raise
            calls = [node for node in calls_of(graph.gm) if node.name in names]
            refused = _refused_alone(calls, why_alone)
            if not refused:
                raise
            return None, refused

    return read_or_ask


def _refused_alone(calls: Iterable[torch.fx.Node], why_alone: Rule) -> dict[str, str]:
    """Return the names of the calls that are refused alone, with the reasons."""
    refused: dict[str, str] = {}
    for node in calls:
        why = None if node.target is operator.getitem else why_alone(node)
        if why is not None:
            refused[node.name] = why
    return refused


def refused_nodes(plain: PlainOnnx, region: Region, why: dict[int, str]) -> dict[str, str]:
    """Return the reasons of a reader's refusals by name of the functional graph's nodes.

    Args:
        plain: The model that was read.
        region: The region that the model was made from.
        why: The reasons of the refusals, by index of the model's nodes.

    Raises:
        Refusal: ``declined``, where none of the refused nodes comes from a node of the graph.
    """
    origins = origins_of(region.gm)
    refused: dict[str, str] = {}
    for index, reason in why.items():
        name = plain.graph.node_of(plain.origins[index] or "")
        if name in origins:
            refused[origins[name]] = reason
    if why and not refused:
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, "; ".join(dict.fromkeys(why.values())))
    return refused
