"""Means that do not keep their dimension, which OpenVINO takes for those that do.

Its norms are found without a look at that (2026.4): of a square ``x``, ``x - x.mean(-1)`` subtracts
from each column the mean of one row, and would be computed as ``x - x.mean(-1, keepdim=True)``.
"""

from __future__ import annotations

from typing import Any


def tell_from_kept(model: Any) -> None:
    """Take means over dimensions that are kept, and drop the dimensions behind them.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay what they are.
    """
    from openvino import opset13

    for node in model.get_ordered_ops():
        if node.get_type_name() == "ReduceMean" and not node.get_attributes()["keep_dims"]:
            targets = node.output(0).get_target_inputs()
            values, axes = node.input_values()
            kept = opset13.reduce_mean(values, axes, keep_dims=True)
            dropped = opset13.squeeze(kept, axes).output(0)
            for target in targets:
                target.replace_source_output(dropped)
