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
from composer.backends.openvino.nodes import SUMS

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
    operands = defaultdict(list)
    for edge in tree.iterfind("edges/edge"):
        operands[edge.get("to-layer")].append(edge.get("from-layer"))
    computed: set[str | None] = set()
    behind_products: set[str | None] = set()
    for layer in tree.iterfind("layers/layer"):  # in the order of the computation
        key, kind = layer.get("id"), layer.get("type")
        given = set(operands[key])
        is_input = kind == "Parameter" and layer.get("name") not in bound
        if kind != "ShapeOf" and (is_input or given & computed):
            computed.add(key)
        is_first = given.isdisjoint(behind_products)
        if kind in _PRODUCTS or not is_first:
            behind_products.add(key)
        is_sum = kind in SUMS and given <= computed
        is_first_convolution = kind in _CONVOLUTIONS and is_first
        if is_sum or is_first_convolution or kind == "MVN":
            _mark_precise(layer)


def _mark_precise(layer: ElementTree.Element) -> None:
    info = layer.find("rt_info")
    if info is None:
        info = ElementTree.SubElement(layer, "rt_info")
    ElementTree.SubElement(info, "attribute", name="precise", version="0")
