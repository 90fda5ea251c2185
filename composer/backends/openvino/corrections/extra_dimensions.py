"""One-element operands that have more dimensions than the other operand.

OpenVINO (2026.4) treats them as scalars when it fuses operations, and loses the dimensions that
they add. Examples are ``F.conv1d(x * ones(1, 1, 1), w)`` of a matrix ``x``, and a leaky rectifier
or a swish with such a slope. OpenVINO then rejects the model, or returns a result without those
dimensions.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy

from composer.backends.openvino import library
from composer.backends.openvino.nodes import (
    PRODUCTS,
    SUMS,
    nodes_of,
    rank_of,
    redirect,
    sizes_of,
)


def spell_out_ranks(model: Any) -> None:
    """Give the other operand the same number of dimensions, by leading ones."""
    for node in nodes_of(model, SUMS | PRODUCTS):
        for operand, other in itertools.permutations(node.inputs()):
            sizes = sizes_of(other)
            if set(sizes) == {1}:
                _raise(operand, len(sizes))


def _raise(operand: Any, rank: int) -> None:
    """Add leading ones to the sizes of an operand with fewer dimensions; not to a scalar."""
    opset13 = library.openvino().opset13
    missing = rank - (rank_of(operand) or rank)
    if missing > 0:
        new = numpy.arange(missing)
        redirect([operand], opset13.unsqueeze(operand.get_source_output(), new))
