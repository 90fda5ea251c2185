"""What composer knows about ATen's operators: one entry per operator, one module per family.

An entry (:class:`~composer.lowering.operators.entry.Operator`) says how a call is decomposed into
other operators, which function translates it to ONNX, and when it must not be translated.
"""

from __future__ import annotations

import functools

from composer.lowering.operators import (
    arithmetic,
    attention,
    convolution,
    creation,
    draws,
    elementwise,
    fused,
    lists,
    norms,
    orders,
    places,
    pool_gradients,
    pools,
    products,
    reductions,
    shapes,
    special,
)
from composer.lowering.operators.entry import Operators

_FAMILIES = (
    arithmetic,
    attention,
    convolution,
    creation,
    draws,
    elementwise,
    fused,
    lists,
    norms,
    orders,
    places,
    pool_gradients,
    pools,
    products,
    reductions,
    shapes,
    special,
)


@functools.cache
def operators() -> Operators:
    """The entries that hold for all engines, by operator."""
    return {operator: entry for family in _FAMILIES for operator, entry in family.entries().items()}
