"""Translations of ours that stand before the exporter's; entries of operators name them.

Each is a function with the operator's signature that emits ONNX nodes, in onnxscript's terms; the
modules that hold them import onnxscript, so they are imported when first used.
"""

from __future__ import annotations

import functools
import importlib

from composer import _torch
from composer.lowering.operators import operators
from composer.lowering.operators.entry import Operators


@functools.cache
def translator() -> _torch.exporter.OnnxTranslator:
    """The exporter's translator, with our translations in front."""
    return translator_with(operators())


def translator_with(entries: Operators) -> _torch.exporter.OnnxTranslator:
    """The exporter's translator, with the translations that these entries name in front."""
    named = {each: entry.translate for each, entry in entries.items() if entry.translate}
    made = _torch.exporter.OnnxTranslator()
    for operator, place in named.items():
        module, _, function = place.partition(":")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        made.register({operator: found})
    return made
