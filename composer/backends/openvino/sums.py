"""Sums and norms in float32, where OpenVINO computes products in bfloat16.

By itself its plugin for the CPU (2026.4) computes everything in bfloat16 then. The sums of a
residual stream are rounded layer by layer, so that what a late layer adds to a large number is
lost. Other engines keep them in float32
(:class:`~composer.passes.lower_precision.LowerPrecision`).

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

from composer.backends.openvino.library import core

_NORMS = frozenset({"MVN", "ReduceMean", "Power", "Sqrt", "Divide", "Subtract"})
"""Of which normalisations are made, where they are no operator of their own."""


def in_float32(read: Any, weights: Collection[str]) -> Any:
    """The model with its sums and norms marked, to be computed in float32.

    A sum with a weight, such as a bias, is a part of the product before it, and not marked.

    Args:
        read: A model of OpenVINO's.
        weights: The inputs of it that are weights.
    """
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        openvino.serialize(read, path)
        tree = ElementTree.parse(path)
        if not _mark(tree, weights):
            return read
        tree.write(path)
        return core().read_model(path, config={"ENABLE_MMAP": False})


def _mark(tree: ElementTree.ElementTree[Any], weights: Collection[str]) -> bool:
    """Whether there was anything to mark."""
    layers = {layer.get("id"): layer for layer in tree.iterfind("layers/layer")}
    given = {
        key: layer.get("type") != "Const" and layer.get("name") not in weights
        for key, layer in layers.items()
    }
    sources = defaultdict(list)
    for edge in tree.iterfind("edges/edge"):
        sources[edge.get("to-layer")].append(edge.get("from-layer"))
    found = [
        layer
        for key, layer in layers.items()
        if layer.get("type") in _NORMS
        or (layer.get("type") == "Add" and all(given[each] for each in sources[key]))
    ]
    for layer in found:
        info = ElementTree.SubElement(layer, "rt_info")
        ElementTree.SubElement(info, "attribute", name="precise", version="0")
    return bool(found)
