"""Which regions of a graph OpenVINO takes, found by asking its model reader."""

from __future__ import annotations

import functools

from composer.backends.base import check_time
from composer.backends.openvino.kernels import why_not_here
from composer.backends.openvino.model import Model, read_model, unread_nodes
from composer.lowering import cuts
from composer.lowering.aot import FunctionalGraph
from composer.lowering.onnx import to_onnx
from composer.lowering.plain import to_plain
from composer.lowering.regions import Region

Cut = cuts.Cut[Model]
"""A graph cut into regions, with the model of each."""


def cut(graph: FunctionalGraph) -> Cut:
    """Cut a functional graph so that OpenVINO's reader takes the whole of every region.

    Raises:
        Refusal: ``declined``, where a region is refused without a node to leave out, or after as
            many rounds as there are.
    """
    inputs = graph.gm.graph.find_nodes(op="placeholder")
    weights = {str(inputs[i].target): weight for i, weight in graph.weights.items()}
    why_not = functools.partial(why_not_here, weights=weights)
    return cuts.cut(graph, "OpenVINO's reader of ONNX", why_not, _read)


def _read(region: Region) -> tuple[Model, dict[str, str]]:
    """The model of a region, or why nodes of it are refused.

    What the reader does not take at first may be said more plainly; and only there every node of
    the model is known to come from one of the graph's.
    """
    check_time()
    graph = to_onnx(region)
    try:
        return read_model(graph), {}
    except RuntimeError:
        plain = to_plain(graph, region.gm)
    unread = unread_nodes(plain.graph)
    if unread:
        return Model(None, plain.graph), cuts.refused_nodes(plain, region, unread)
    return read_model(plain.graph), {}
