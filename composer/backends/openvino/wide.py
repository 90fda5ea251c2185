"""Nodes that stay in float32 where OpenVINO computes products in bfloat16.

Without this, OpenVINO's plugin for the CPU (2026.4) computes everything in bfloat16. This loses
precision in two places:

- The sums of a residual stream are rounded in each layer, so a small term that a late layer adds to
  a large number is lost. Other engines keep these sums, and norms, in float32
  (:class:`~composer.passes.lower_precision.LowerPrecision`).
- The values of an image are rounded before anything is computed from them. Float32 is cheap there:
  the convolution that reads them takes a hundredth of the time of a model such as ViT.

The attribute ``precise`` of a node makes OpenVINO compute it in the precision of the model. Python
cannot set the attribute, but a model's file can contain it. So the model is written to a file,
marked and read again. Its weights are inputs, and are not written.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from composer.backends.openvino import library

_SUMS = frozenset({"Add", "Subtract"})
_CONVOLUTIONS = frozenset({"Convolution", "GroupConvolution"})
_PRODUCTS = _CONVOLUTIONS | {f"{each}BackpropData" for each in _CONVOLUTIONS} | {"MatMul", "Einsum"}


def in_float32(read: Any, bound: Collection[str]) -> Any:
    """Return the model with some nodes marked to be computed in float32.

    The nodes are layer norms, convolutions without another product before them, and sums and
    differences of two computed values. A bias is not a computed value.

    Args:
        read: A model of OpenVINO's.
        bound: The names of its inputs that become weights or constants.
    """
    openvino = library.openvino()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        openvino.serialize(read, path)
        tree = ElementTree.parse(path)
        _mark(tree, bound)
        tree.write(path)
        return library.core().read_model(path, config={"ENABLE_MMAP": False})


def _mark(tree: ElementTree.ElementTree[Any], bound: Collection[str]) -> None:
    sources = defaultdict(list)
    for edge in tree.iterfind("edges/edge"):
        sources[edge.get("to-layer")].append(edge.get("from-layer"))
    computed: dict[str | None, bool] = {}
    multiplied: dict[str | None, bool] = {}
    for layer in tree.iterfind("layers/layer"):  # in the order of the computation
        key, kind = layer.get("id"), layer.get("type")
        given = [computed[each] for each in sources[key]]
        is_input = kind == "Parameter" and layer.get("name") not in bound
        computed[key] = kind != "ShapeOf" and (is_input or any(given))
        is_first = not any(multiplied[each] for each in sources[key])
        multiplied[key] = kind in _PRODUCTS or not is_first
        is_sum = kind in _SUMS and all(given)
        if is_sum or kind == "MVN" or (kind in _CONVOLUTIONS and is_first):
            info = layer.find("rt_info")
            info = ElementTree.SubElement(layer, "rt_info") if info is None else info
            ElementTree.SubElement(info, "attribute", name="precise", version="0")
