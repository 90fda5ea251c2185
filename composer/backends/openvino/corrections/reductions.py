"""Reduced dimensions that are counted from the last, which OpenVINO miscounts.

It moves what adds a dimension, ``Unsqueeze`` or such a ``Reshape``, behind a reduction, and leaves
the reduction's negative axes as they are (2026.4): ``x.unsqueeze(-1).sum(-2)`` would add up the
second last dimension of ``x``, not the last.
"""

from __future__ import annotations

from typing import Any


def count_from_the_first(model: Any) -> None:
    """Name the dimensions of reductions by positive numbers.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay what they are.
    """
    from openvino import opset13

    for node in model.get_ordered_ops():
        if node.get_type_name().startswith("Reduce"):
            rank = node.get_input_partial_shape(0).rank
            axes = _constant(node.input_value(1).get_node())
            if rank.is_static and axes is not None and (axes.get_data() < 0).any():
                counted = opset13.constant(axes.get_data() % rank.get_length())
                node.input(1).replace_source_output(counted.output(0))


def _constant(node: Any) -> Any:
    """Where the axes are written; the exporter makes a list of a single one by a reshape."""
    if node.get_type_name() == "Reshape":
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" else None
