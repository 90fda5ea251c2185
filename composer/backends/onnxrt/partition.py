"""Decide which regions of a graph ONNX Runtime takes.

ONNX Runtime is given a whole region first. If it refuses the region, each call of it is translated
and loaded by itself, which takes some milliseconds a call. This is needed because ONNX Runtime
names at most one node when it refuses a model. If the translation to ONNX fails, no node is named.
"""

from __future__ import annotations

import torch
import torch.fx

from composer.backends.onnxrt.engine import OnnxRuntimeEngine, make_engine
from composer.backends.onnxrt.kernels import dtypes_of, lacking, narrow_here, why_not_here
from composer.backends.onnxrt.settings import Settings
from composer.backends.onnxrt.tails import keep_tails
from composer.backends.onnxrt.widening import widen
from composer.build import Artefacts, BuildTerms
from composer.errors import Refusal
from composer.graphs.keys import graph_key
from composer.lowering.aot import FunctionalGraph
from composer.lowering.export.onnx import to_onnx
from composer.lowering.partition import by_trial
from composer.lowering.partition.regions import Region, alone
from composer.records import Reason

Partition = by_trial.Partition[OnnxRuntimeEngine]
"""A graph cut into regions, with the engine of each region."""

_OF_ONE_CALL = frozenset({Reason.UNSUPPORTED_OP, Reason.EXPORT_FAILED, Reason.BUILD_FAILED})
"""Reasons for which a region is refused because of one of its calls."""


def partition(
    graph: FunctionalGraph, settings: Settings, device: torch.device, terms: BuildTerms
) -> Partition:
    """Partition a functional graph so that ONNX Runtime takes the whole of every region.

    The graph is not changed; the regions are copies of its parts.

    Raises:
        Refusal: a region is refused although each of its calls is taken by itself, or calls are
            still refused after several tries.
    """
    reasons: dict[str, str | None] = {}

    def load(region: Region, artefacts: Artefacts) -> OnnxRuntimeEngine:
        terms.check_time()
        widen(region.gm, lambda node: narrow_here(node, device))
        keep_tails(region.gm)
        return make_engine(to_onnx(region, artefacts), region, settings, device)

    def why_alone(node: torch.fx.Node) -> str | None:
        region = alone(node)
        key = graph_key(region.gm)
        if key not in reasons:
            try:
                load(region, terms.artefacts.off_disk())
                reasons[key] = None
            except Refusal as refusal:
                reasons[key] = _describe(refusal, node)
        return reasons[key]

    def load_whole(region: Region) -> tuple[OnnxRuntimeEngine, dict[str, str]]:
        return load(region, terms.artefacts), {}  # no call is refused, or it has raised

    def writes_in_place(node: torch.fx.Node) -> bool:
        """True if the engine can write rows in place at this node."""
        return device.type == "cpu" and not narrow_here(node, device)

    return by_trial.partition_by_trial(
        graph,
        "ONNX Runtime",
        lambda node: why_not_here(node, device),
        by_trial.asking_each_call(graph, load_whole, _OF_ONE_CALL, why_alone),
        writes=writes_in_place,
    )


def _describe(refusal: Refusal, node: torch.fx.Node) -> str:
    """A short text that says why a call was refused.

    Raises:
        Refusal: the refusal itself, if the call is not its cause.
    """
    first_line, *_ = str(refusal).partition("\n")
    match refusal.reason:
        case Reason.UNSUPPORTED_OP:
            return lacking(dtypes_of(node))
        case Reason.EXPORT_FAILED:
            return f"the exporter fails: {first_line}"
        case Reason.BUILD_FAILED:
            without_code = first_line.rpartition(" : ")[2]
            return f"ONNX Runtime refuses it: {without_code}"
    raise refusal
