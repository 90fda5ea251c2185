"""Reductions, which OpenVINO computes over other dimensions, or takes for those of a norm.

Three faults (2026.4), all of what it makes of a reduction and its neighbours:

- It moves what adds a dimension, ``Unsqueeze`` or such a ``Reshape``, behind a reduction, and does
  not count negative axes anew: ``x.unsqueeze(-1).sum(-2)`` would add up the second last dimension
  of ``x``, not the last.
- It moves a transpose that brings a dimension of one place elsewhere behind a reduction, and drops
  the wrong dimension: ``x.permute(1, 2, 0).sum(0)`` of ``(1, 3, 8)`` would be a row of ``(1, 8)``.
- Norms are found without a look at whether a mean keeps its dimension: of a square ``x``,
  ``x - x.mean(-1)`` subtracts from each column the mean of one row, and would be computed as
  ``x - x.mean(-1, keepdim=True)``.
"""

from __future__ import annotations

import re
from typing import Any

from composer.backends.openvino import library


def spell_out_reductions(model: Any) -> None:
    """Count axes from the first; keep dimensions, and drop them behind the reduction.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay what they are.
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
    """Where the axes are written; the exporter makes a list of a single one by a reshape."""
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
