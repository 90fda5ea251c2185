"""Magnitudes, which OpenVINO computes with the arithmetic of shapes in mind.

It takes none where it believes that no number is negative, and moves that of a concatenated vector
before the concatenation (2026.4), whoever else reads that: of ``v = torch.cat([a, b])`` it would
give ``v * v.abs()`` as ``v.abs() * v.abs()``.
"""

from __future__ import annotations

from typing import Any

import numpy

from composer.backends.openvino import library

_ROWS = numpy.array([0])


def compute_magnitudes(model: Any) -> None:
    """Have constants computed before OpenVINO looks for magnitudes that it need not take.

    It is wrong about what is made of constants (2026.4); of a constant itself it is right.

    Args:
        model: A model of OpenVINO's, changed in place.
    """
    if any(node.get_type_name() == "Abs" for node in model.get_ops()):
        passes = library.passes()
        manager = passes.Manager()
        manager.register_pass(passes.ConstantFolding())
        manager.run_passes(model)


def keep_signs(model: Any) -> None:
    """Take magnitudes of vectors as those of matrices of one row.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay what they are.
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
