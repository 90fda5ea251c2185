"""What stays in float32 where OpenVINO computes products in bfloat16.

By itself its plugin for the CPU (2026.4) computes everything in bfloat16 then. The sums of a
residual stream are rounded layer by layer, so that what a late layer adds to a large number is
lost. Other engines keep them, and norms, in float32
(:class:`~composer.passes.lower_precision.LowerPrecision`). And an image's numbers are rounded
before anything was computed of them, though the convolution that reads them takes a hundredth of
the time of a model such as ViT.

An attribute of a node, ``precise``, has it computed in the precision that the model says. Python
cannot set it. It can stand in a model's file, so the model is written, marked and read again; its
weights are inputs, and not written.
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
    """The model with some of its nodes marked, to be computed in float32.

    They are sums and differences of two computed values (a bias that is added to a product is
    none), layer norms, and convolutions that no other product stands before.

    Args:
        read: A model of OpenVINO's.
        bound: The inputs of it that weights and constants are taken in for.
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
