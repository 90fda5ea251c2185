"""What composer knows of ATen's operators: one entry an operator, one module a family.

An entry (:class:`~composer.lowering.operators.entry.Operator`) says how a call is written out in
other operators, which function translates it to ONNX, and when it must not be translated.
:mod:`~composer.lowering.operators.fusions` has entries that engines may add to their own: they make
one operator of ONNX Runtime's of what ONNX says in many.
"""

from __future__ import annotations

import functools

from composer.lowering.operators import (
    attention,
    bounds,
    convolution,
    creation,
    divisions,
    draws,
    elementwise,
    fused,
    images,
    lists,
    losses,
    norms,
    orders,
    places,
    pool_gradients,
    pools,
    products,
    reductions,
    scans,
    shapes,
    special,
)
from composer.lowering.operators.entry import Operators

_FAMILIES = (
    *(attention, bounds, convolution, creation, divisions, draws, elementwise, fused, images),
    *(lists, losses, norms, orders, places, pool_gradients, pools, products, reductions, scans),
    *(shapes, special),
)


@functools.cache
def operators() -> Operators:
    """Every entry that holds for all engines."""
    return {operator: entry for family in _FAMILIES for operator, entry in family.entries().items()}
