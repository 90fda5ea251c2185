"""Absolute values, which OpenVINO computes wrongly by rules that are meant for shapes.

OpenVINO (2026.4) removes ``Abs`` where it believes that no number is negative. It also moves
``Abs`` of a concatenated vector before the concatenation, and ignores other users of that vector:
for ``v = torch.cat([a, b])`` it computes ``v * v.abs()`` as ``v.abs() * v.abs()``.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library
from composer.backends.openvino.nodes import insert_behind, nodes_of, rank_of

_ROWS = numpy.array([0])


def compute_magnitudes(model: Any) -> None:
    """Fold constants before OpenVINO decides which ``Abs`` it can remove.

    OpenVINO (2026.4) decides wrongly for values that are computed from constants. It decides right
    for constants themselves.
    """
    if nodes_of(model, {"Abs"}):
        passes = library.passes()
        manager = passes.Manager()
        manager.register_pass(passes.ConstantFolding())
        manager.run_passes(model)


def keep_signs(model: Any) -> None:
    """Compute ``Abs`` of a vector as that of a one-row matrix, which OpenVINO does not move."""
    for node in nodes_of(model, {"Abs"}):
        if rank_of(node.input(0)) == 1:
            insert_behind(node, _by_matrix)


def _by_matrix(magnitude: Any) -> Any:
    opset13 = library.openvino().opset13
    row = opset13.unsqueeze(magnitude.input_value(0), _ROWS)
    return opset13.squeeze(opset13.abs(row), _ROWS)
