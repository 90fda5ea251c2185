"""Reshapes to no dimensions, behind which OpenVINO crashes if the value comes from a product.

OpenVINO (2026.4) ends the process while it compiles ``MatMul`` and then ``Reshape`` to the empty
shape, with fixed and with dynamic sizes. ``Squeeze`` of all dimensions is right there.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library
from composer.backends.openvino.nodes import nodes_of, rank_of


def squeeze_to_scalars(model: Any) -> None:
    """Write a reshape to no dimensions as a squeeze of all of them."""
    squeeze = library.openvino().opset13.squeeze
    for node in nodes_of(model, {"Reshape"}):
        rank = rank_of(node.input(0))
        if rank_of(node.output(0)) == 0 and rank:
            scalar = squeeze(node.input_value(0), numpy.arange(rank))
            node.output(0).replace(scalar.output(0))
