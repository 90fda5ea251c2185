"""The regions of a graph that OpenVINO runs, found by asking OpenVINO's reader."""

from __future__ import annotations

import functools

import torch.fx

from composer.backends.openvino.kernels import why_not_here
from composer.backends.openvino.model import Model, read_model, unread_nodes
from composer.build import Artefacts, BuildTerms
from composer.errors import Refusal
from composer.lowering.aot import FunctionalGraph
from composer.lowering.export.onnx import to_onnx
from composer.lowering.export.plain import to_plain
from composer.lowering.partition import by_trial as partitions
from composer.lowering.partition.regions import Region, alone
from composer.records import Reason

Partition = partitions.Partition[Model]
"""The regions of a graph, with the model of each."""


def partition(graph: FunctionalGraph, terms: BuildTerms) -> Partition:
    """Partition a functional graph into regions that OpenVINO's reader accepts as a whole.

    Raises:
        Refusal: ``declined`` if a region is refused without a node to leave out, or if regions are
            still refused after the last round.
    """
    inputs = graph.gm.graph.find_nodes(op="placeholder")
    weights = {str(inputs[i].target): weight for i, weight in graph.weights.items()}
    why_not = functools.partial(why_not_here, weights=weights)

    def read_region(region: Region) -> tuple[Model, dict[str, str]]:
        terms.check_time()
        return _read(region, terms.artefacts)

    def why_alone(node: torch.fx.Node) -> str | None:
        terms.check_time()
        return _why_alone(node, terms.artefacts.off_disk())

    read = partitions.asking_each_call(graph, read_region, {Reason.EXPORT_FAILED}, why_alone)
    return partitions.partition_by_trial(graph, "OpenVINO's reader of ONNX", why_not, read)


def _why_alone(node: torch.fx.Node, artefacts: Artefacts) -> str | None:
    """Return why a call cannot be translated or read by itself; ``None`` if it can."""
    try:
        _, refused = _read(alone(node), artefacts)
    except Refusal as why:
        if why.reason is not Reason.EXPORT_FAILED:
            raise
        said, *_ = str(why).partition("\n")
        return f"the exporter fails: {said}"
    return refused.get(node.name)


def _read(region: Region, artefacts: Artefacts) -> tuple[Model, dict[str, str]]:
    """Return the model of a region, and why nodes of it are refused.

    If the reader rejects the model, it is translated again to plain ONNX. Plain ONNX may be
    accepted, and each of its nodes is known to come from one node of the graph.
    """
    graph = to_onnx(region, artefacts)
    try:
        return read_model(graph), {}
    except RuntimeError:
        plain = to_plain(graph)
    unread = unread_nodes(plain.graph)
    if unread:
        return Model(None, plain.graph), partitions.refused_nodes(plain, region, unread)
    return read_model(plain.graph), {}
