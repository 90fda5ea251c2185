"""What composer knows of ATen's operators: one entry an operator, one module a family.

An entry (:class:`~composer.lowering.operators.entry.Operator`) says how a call is written out in
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
    *(
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
    ),
    *(places, pool_gradients, pools, products, reductions, shapes, special),
)


@functools.cache
def operators() -> Operators:
    """Every entry that holds for all engines."""
    return {operator: entry for family in _FAMILIES for operator, entry in family.entries().items()}
