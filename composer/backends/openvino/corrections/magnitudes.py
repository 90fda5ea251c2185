"""Absolute values, which OpenVINO computes wrongly by rules that are meant for shapes.

OpenVINO (2026.4) removes ``Abs`` where it believes that no number is negative. It also moves
``Abs`` of a concatenated vector before the concatenation, and ignores other users of that vector:
for ``v = torch.cat([a, b])`` it computes ``v * v.abs()`` as ``v.abs() * v.abs()``.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library

_ROWS = numpy.array([0])


def compute_magnitudes(model: Any) -> None:
    """Fold constants before OpenVINO decides which ``Abs`` it can remove.

    OpenVINO (2026.4) decides wrongly for values that are computed from constants. It decides right
    for constants themselves.

    Args:
        model: A model of OpenVINO's, changed in place.
    """
    if any(node.get_type_name() == "Abs" for node in model.get_ops()):
        passes = library.passes()
        manager = passes.Manager()
        manager.register_pass(passes.ConstantFolding())
        manager.run_passes(model)


def keep_signs(model: Any) -> None:
    """Compute ``Abs`` of a vector as that of a matrix with one row, which OpenVINO does not move.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay the same.
    """
    opset13 = library.openvino().opset13
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Abs":
            rank = node.get_input_partial_shape(0).rank
            if rank.is_static and rank.get_length() == 1:
                targets = node.output(0).get_target_inputs()
                row = opset13.unsqueeze(node.input_value(0), _ROWS)
                vector = opset13.squeeze(opset13.abs(row), _ROWS).output(0)
                for target in targets:
                    target.replace_source_output(vector)
