"""Composer's own translations to ONNX, which take precedence over the exporter's.

Each is a function with the operator's signature that emits ONNX nodes with onnxscript. The entries
of operators name these functions. Their modules import onnxscript, so they are imported at the
first use.
"""

from __future__ import annotations

import functools
import importlib

from composer import _torch
from composer.lowering.operators import operators
from composer.lowering.operators.entry import Operators


def translator() -> _torch.exporter.OnnxTranslator:
    """The exporter's translator, in which composer's translations take precedence."""
    return _translator(_torch.operators.can_quantize())


@functools.cache
def _translator(quantized: bool) -> _torch.exporter.OnnxTranslator:
    """The translator, made again once the operators that quantize are loaded."""
    return translator_with(operators())


def translator_with(entries: Operators) -> _torch.exporter.OnnxTranslator:
    """The exporter's translator, in which the translations named by ``entries`` take precedence."""
    named = {each: entry.translate for each, entry in entries.items() if entry.translate}
    made = _torch.exporter.OnnxTranslator()
    for operator, place in named.items():
        module, _, function = place.partition(":")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        made.register({operator: found})
    return made
