"""Which regions of a graph TensorRT takes, found by asking its parser."""

from __future__ import annotations

from composer.backends.tensorrt.dtypes import why_not_here
from composer.backends.tensorrt.engine import in_host_memory
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.network import parse
from composer.backends.tensorrt.settings import Settings
from composer.build import BuildTerms
from composer.lowering.aot import FunctionalGraph
from composer.lowering.export.onnx import to_onnx
from composer.lowering.export.plain import PlainOnnx, to_plain
from composer.lowering.partition import by_trial as partitions
from composer.lowering.partition.regions import Region

Partition = partitions.Partition[PlainOnnx]
"""A graph in regions, with the model of each."""


def partition(
    graph: FunctionalGraph, library: Library, settings: Settings, terms: BuildTerms
) -> Partition:
    """Partition a functional graph so that TensorRT's parser takes the whole of every region.

    Raises:
        Refusal: ``declined``, where a region is refused without a node to leave out, or after as
            many rounds as there are.
    """

    def read(region: Region) -> tuple[PlainOnnx, dict[str, str]]:
        terms.check_time()
        plain = to_plain(to_onnx(region, terms.artefacts), settings.precision)
        return plain, _refused(library, plain, region)

    return partitions.partition_by_trial(graph, "TensorRT's parser", why_not_here, read)


def _refused(library: Library, plain: PlainOnnx, region: Region) -> dict[str, str]:
    """Why nodes of the functional graph are refused, by name.

    Raises:
        Refusal: the model is refused, and no node of the graph is named.
    """
    weights = in_host_memory(plain.graph.inputs, region.weights | region.constants)
    with library.busy, library.log.recording() as lines:
        parsed = parse(library, plain.graph, weights, lines)
    if parsed.error is not None:
        raise parsed.error
    return partitions.refused_nodes(plain, region, parsed.refused)
