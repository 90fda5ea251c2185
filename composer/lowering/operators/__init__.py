"""What composer knows about ATen's operators: one entry per operator, one module per family.

An entry (:class:`~composer.lowering.operators.entry.Operator`) says how a call is decomposed into
other operators, which function translates it to ONNX, and when it must not be translated.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

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
    "reductions",
    "shapes",
    "special",
)


@functools.cache
def operators() -> Operators:
    """The entries that hold for all engines, by operator."""
    table: dict[Any, Operator] = {}
    for family in _FAMILIES:
        table |= importlib.import_module(f"{__name__}.{family}").entries()
    return table
