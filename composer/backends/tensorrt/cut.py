"""Which regions of a graph TensorRT takes: its own parser is asked, until it takes all of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch.fx

from composer import clones
from composer.backends.base import check_time
from composer.backends.tensorrt.dtypes import why_not_here
from composer.backends.tensorrt.engine import in_host_memory
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.network import parse
from composer.backends.tensorrt.settings import Settings
from composer.errors import Refusal, refuse
from composer.lowering.aot import FunctionalGraph
from composer.lowering.onnx import to_onnx
from composer.lowering.origins import mark_origins, origin_of, origins_of
from composer.lowering.plain import PlainOnnx, to_plain
from composer.lowering.regions import Region, Split, split
from composer.records import Reason, Status

_ROUNDS = 8
"""How often the parser is asked: what it refuses may hide what else it would."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A graph cut into regions, with the model of each."""

    parts: Split
    models: dict[str, PlainOnnx]


def cut(graph: FunctionalGraph, library: Library, settings: Settings) -> Cut:
    """Cut a functional graph so that TensorRT's parser takes the whole of every region.

    Raises:
        Refusal: ``declined``, where a region is refused without a node to leave out, or after as
            many rounds as there are.
    """
    mark_origins(graph.gm)
    refused: dict[str, str] = {}

    def why_not(node: torch.fx.Node) -> str | None:
        return refused.get(origin_of(node)) or why_not_here(node)

    for _ in range(_ROUNDS):
        check_time()
        parts = split(dataclasses.replace(graph, gm=clones.clone_graph(graph.gm)), why_not)
        models: dict[str, PlainOnnx] = {}
        found: dict[str, str] = {}
        for name, region in parts.regions.items():
            models[name] = to_plain(to_onnx(region), region.gm, settings.precision)
            found |= _refused(library, models[name], region)
        if not found:
            return Cut(parts, models)
        refused |= found
    what = f"TensorRT's parser still refuses {', '.join(found)} after {_ROUNDS} cuts"
    raise Refusal(Status.DECLINED, Reason.UNSUPPORTED_OP, what)


def _refused(library: Library, plain: PlainOnnx, region: Region) -> dict[str, str]:
    """Why nodes of the functional graph are refused, by name.

    Raises:
        Refusal: the model is refused, and no node of the graph is named.
    """
    names = plain.graph.inputs
    weights = in_host_memory(names, region.weights | region.constants)
    with library.busy, library.log.recording() as lines:
        parsed = parse(library, plain.graph, weights, lines)
    if parsed.error is not None:
        raise parsed.error
    origins = origins_of(region.gm)
    found: dict[str, str] = {}
    for index, why in parsed.refused.items():
        name = plain.origins[index]
        if name is not None and name in origins:
            found[origins[name]] = why
    if parsed.refused and not found:
        why = "; ".join(dict.fromkeys(parsed.refused.values()))
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, why)
    return found
