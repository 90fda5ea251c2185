"""Which regions of a graph an engine takes: its own reader is asked, until it takes all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.fx

from composer.errors import Refusal, refuse
from composer.graphs import clones
from composer.lowering.aot import FunctionalGraph
from composer.lowering.origins import mark_origins, origin_of, origins_of
from composer.lowering.plain import PlainOnnx
from composer.lowering.regions import Region, Split, split
from composer.records import Reason, Status

M = TypeVar("M")

_ROUNDS = 8
"""How often the reader is asked: what it refuses may hide what else it would."""


@dataclass(frozen=True, slots=True)
class Cut(Generic[M]):
    """A graph cut into regions, with what the reader made of each."""

    parts: Split
    models: dict[str, M]


def cut(
    graph: FunctionalGraph,
    reader: str,
    why_not: Callable[[torch.fx.Node], str | None],
    read: Callable[[Region], tuple[M | None, dict[str, str]]],
) -> Cut[M]:
    """Cut a functional graph so that an engine's reader takes the whole of every region.

    Args:
        graph: The graph; it is not changed.
        reader: What the reader is called, for messages.
        why_not: Why a call is left to torch without asking; ``None`` if it is not.
        read: Makes the engine's model of a region, or says why nodes are refused, by the names
            of the functional graph's.

    Raises:
        Refusal: ``declined``, where after as many rounds as there are something is refused still.
    """
    mark_origins(graph.gm)
    refused: dict[str, str] = {}

    def why(node: torch.fx.Node) -> str | None:
        return refused.get(origin_of(node)) or why_not(node)

    for _ in range(_ROUNDS):
        parts = split(dataclasses.replace(graph, gm=clones.clone_graph(graph.gm)), why)
        models: dict[str, M] = {}
        found: dict[str, str] = {}
        for name, region in parts.regions.items():
            model, said = read(region)
            if model is not None:
                models[name] = model
            found |= said
        if not found:
            return Cut(parts, models)
        refused |= found
    what = f"{reader} still refuses {', '.join(found)} after {_ROUNDS} cuts"
    raise Refusal(Status.DECLINED, Reason.UNSUPPORTED_OP, what)


def refused_nodes(plain: PlainOnnx, region: Region, why: dict[int, str]) -> dict[str, str]:
    """Why nodes of the functional graph are refused, by name.

    Args:
        plain: The model that was read.
        region: What it was made from.
        why: Why nodes of the model are refused, by their index.

    Raises:
        Refusal: ``declined``, where something is refused and it belongs to no node of the graph.
    """
    origins = origins_of(region.gm)
    named = {plain.origins[index] or "": said for index, said in why.items()}
    found = {origins[name]: said for name, said in named.items() if name in origins}
    if why and not found:
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, "; ".join(dict.fromkeys(why.values())))
    return found
