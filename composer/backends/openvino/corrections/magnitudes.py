"""Magnitudes, which OpenVINO does not compute where it believes that no number is negative."""

from __future__ import annotations

from typing import Any


def compute_magnitudes(model: Any) -> None:
    """Have constants computed before OpenVINO looks for magnitudes that it need not take.

    It is wrong about what is made of constants (2026.4); of a constant itself it is right.

    Args:
        model: A model of OpenVINO's, changed in place.
    """
    from openvino.passes import ConstantFolding, Manager

    if any(node.get_type_name() == "Abs" for node in model.get_ops()):
        passes = Manager()
        passes.register_pass(ConstantFolding())
        passes.run_passes(model)
