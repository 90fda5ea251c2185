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

_ARITHMETIC = {"Add", "Subtract", "Multiply", "Divide"}


def spell_out_ranks(model: Any) -> None:
    """Give the other operand the same number of dimensions, by leading ones.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay the same.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() in _ARITHMETIC:
            for operand, other in itertools.permutations(node.inputs()):
                _raise(operand, other.get_partial_shape())


def _raise(operand: Any, shape: Any) -> None:
    """Add leading ones to the sizes of an operand, if the other operand has only sizes of one."""
    opset13 = library.openvino().opset13
    rank = operand.get_partial_shape().rank
    if rank.is_dynamic or shape.rank.is_dynamic:
        return
    missing = shape.rank.get_length() - rank.get_length()
    if rank.get_length() and missing > 0 and all(size == 1 for size in shape):
        raised = opset13.unsqueeze(operand.get_source_output(), numpy.arange(missing))
        operand.replace_source_output(raised.output(0))
