"""Reductions that OpenVINO computes over the wrong dimensions, or takes for part of a norm.

OpenVINO 2026.4 has three faults where it rewrites a reduction together with its neighbours:

- It moves ``Unsqueeze``, or a ``Reshape`` that adds a dimension, behind a reduction, and does not
  adjust negative axes. For ``x.unsqueeze(-1).sum(-2)`` it sums over the second last dimension of
  ``x``, not the last.
- It moves a transpose behind a reduction if the transpose only moves a dimension of size one, and
  then drops the wrong dimension. For ``x.permute(1, 2, 0).sum(0)`` with ``x`` of shape
  ``(1, 3, 8)`` it returns the shape ``(1, 8)``.
- Its pattern for norms does not check if a mean keeps its dimension. If ``x`` is square,
  ``x - x.mean(-1)`` subtracts from each column the mean of one row. OpenVINO keeps the dimension of
  the mean, and so subtracts from each row its own mean.
"""

from __future__ import annotations

import re
from typing import Any

from composer.backends.openvino import library


def spell_out_reductions(model: Any) -> None:
    """Make axes non-negative and keep reduced dimensions; a squeeze then drops them.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay the same.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name().startswith("Reduce"):
            _count_from_the_first(node)
            if not node.get_attributes()["keep_dims"]:
                _drop_behind(node)


def _count_from_the_first(reduction: Any) -> None:
    opset13 = library.openvino().opset13
    rank = reduction.get_input_partial_shape(0).rank
    axes = _constant(reduction.input_value(1).get_node())
    if rank.is_static and axes is not None and (axes.get_data() < 0).any():
        counted = opset13.constant(axes.get_data() % rank.get_length())
        reduction.input(1).replace_source_output(counted.output(0))


def _constant(node: Any) -> Any:
    """Return the constant that holds the axes, or ``None``.

    For a single axis the exporter makes the list by a reshape, which is skipped here.
    """
    if node.get_type_name() == "Reshape":
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" else None


def _drop_behind(reduction: Any) -> None:
    opset13 = library.openvino().opset13
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", reduction.get_type_name())  # ReduceSum, Reduce_Sum
    reduce = getattr(opset13, words.lower())
    targets = reduction.output(0).get_target_inputs()
    values, axes = reduction.input_values()
    kept = reduce(values, axes, keep_dims=True)
    dropped = opset13.squeeze(kept, axes).output(0)
    for target in targets:
        target.replace_source_output(dropped)
