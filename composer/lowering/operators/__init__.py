"""What composer knows about ATen's operators: one entry per operator, one module per family.

An entry (:class:`~composer.lowering.operators.entry.Operator`) says how a call is decomposed into
other operators, which function translates it to ONNX, and when it must not be translated.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from composer import _torch
from composer.lowering.operators.entry import Operator, Operators

_FAMILIES = (
    "arithmetic",
    "attention",
    "convolution",
    "creation",
    "draws",
    "elementwise",
    "fused",
    "lists",
    "norms",
    "orders",
    "places",
    "pool_gradients",
    "pools",
    "products",
    "quantized",
    "reductions",
    "shapes",
    "special",
)


def operators() -> Operators:
    """The entries that hold for all engines, by operator."""
    return _entries(_torch.operators.can_quantize())


@functools.cache
def _entries(quantized: bool) -> Operators:
    """All entries, made again once the operators that quantize are loaded."""
    table: dict[Any, Operator] = {}
    for family in _FAMILIES:
        table |= importlib.import_module(f"{__name__}.{family}").entries()
    return table
