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
from composer.backends.openvino.nodes import constant_of, insert_behind, rank_of, redirect


def spell_out_reductions(model: Any) -> None:
    """Make axes non-negative and keep reduced dimensions; a squeeze then drops them."""
    for node in model.get_ordered_ops():
        if node.get_type_name().startswith("Reduce"):
            _count_from_the_first(node)
            if not node.get_attributes()["keep_dims"]:
                insert_behind(node, _kept_then_dropped)


def _count_from_the_first(reduction: Any) -> None:
    rank, axes = rank_of(reduction.input(0)), constant_of(reduction.input_value(1).get_node())
    if rank is not None and axes is not None and axes.data.min(initial=0) < 0:
        counted = library.openvino().opset13.constant(axes.data % rank)
        redirect([reduction.input(1)], counted)


def _kept_then_dropped(reduction: Any) -> Any:
    opset13 = library.openvino().opset13
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", reduction.get_type_name())  # ReduceSum, Reduce_Sum
    reduce = getattr(opset13, words.lower())
    values, axes = reduction.input_values()
    return opset13.squeeze(reduce(values, axes, keep_dims=True), axes)
