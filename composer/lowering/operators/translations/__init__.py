"""Translations of ours that stand before the exporter's.

Each is a function with the operator's signature that emits ONNX nodes, in onnxscript's terms; the
modules that hold them import onnxscript, so they are imported when first used.
"""

from __future__ import annotations

import functools

from composer import _torch


@functools.cache
def translator() -> _torch.exporter.OnnxTranslator:
    """The exporter's translator, with our translations in front."""
    from composer.lowering.operators.translations import (
        comparisons,
        diagonals,
        fused,
        pooling,
        rows,
        shapes,
        splits,
    )

    made = _torch.exporter.OnnxTranslator()
    for module in (shapes, splits, comparisons, diagonals, pooling, rows, fused):
        made.register(module.TRANSLATIONS)
    return made
