"""The regions of a graph that TensorRT runs, found by asking TensorRT's parser."""

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
"""The regions of a graph, with the model of each."""


def partition(
    graph: FunctionalGraph, library: Library, settings: Settings, terms: BuildTerms
) -> Partition:
    """Partition a functional graph into regions that TensorRT's parser accepts as a whole.

    Raises:
        Refusal: ``declined`` if a region is refused without a node to leave out, or if something is
            still refused after the last round.
    """

    def read(region: Region) -> tuple[PlainOnnx, dict[str, str]]:
        terms.check_time()
        plain = to_plain(to_onnx(region, terms.artefacts), settings.precision)
        return plain, _refused(library, plain, region)

    return partitions.partition_by_trial(graph, "TensorRT's parser", why_not_here, read)


def _refused(library: Library, plain: PlainOnnx, region: Region) -> dict[str, str]:
    """Return why TensorRT refuses nodes of the functional graph, by node name.

    Raises:
        Refusal: TensorRT refuses the model, and names no node.
    """
    weights = in_host_memory(plain.graph.inputs, region.weights | region.constants)
    with library.busy, library.log.recording() as lines:
        parsed = parse(library, plain.graph, weights, lines)
    if parsed.error is not None:
        raise parsed.error
    return partitions.refused_nodes(plain, region, parsed.refused)
