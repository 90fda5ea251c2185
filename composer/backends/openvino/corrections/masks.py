"""Masks of attention, where OpenVINO computes in bfloat16.

Programs mask with the lowest float32 number, which is outside the range of bfloat16. OpenVINO
(2026.4) rounds it to minus infinity. The softmax of a row that is fully masked is then NaN; in
float32 it is finite. NaN spreads from there to rows that are not masked. Masks are also computed as
a product with the lowest number; zero times infinity, where nothing is masked, is NaN as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from composer.backends.openvino import library
from composer.backends.openvino.nodes import (
    constant_of,
    kinds_of,
    nodes_of,
    reachable,
    redirect,
    sources,
)

_RANGE = torch.finfo(torch.bfloat16)
_MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Broadcast"}


def bound_masks(model: Any) -> None:
    """Limit constants, and terms that are added to attention scores, to the range of bfloat16."""
    for number in filter(_is_beyond, nodes_of(model, {"Constant"})):
        nearest = library.openvino().opset13.constant(number.data.clip(_RANGE.min, _RANGE.max))
        number.output(0).replace(nearest.output(0))
    bounded: dict[tuple[str, int], Any] = {}
    for softmax in nodes_of(model, {"Softmax"}):
        for term in list(_terms(softmax.input(0), is_sum=False)):
            value = term.get_source_output()
            key = value.get_node().get_name(), value.get_index()
            if key not in bounded and not _is_of_a_product(value.get_node()):
                bounded[key] = _bounded(value)
            if key in bounded:
                redirect([term], bounded[key])


def _is_beyond(constant: Any) -> bool:
    """True for a single float32 number that is finite and outside the range of bfloat16."""
    if constant.data.dtype != "float32" or constant.data.size != 1:
        return False
    return bool(_RANGE.max < abs(constant.data.item()) < math.inf)


def _bounded(value: Any) -> Any:
    """Return a node that clamps a term of attention scores to the range of bfloat16.

    If the term is a product, all its users read the clamped value. Such a product is a mask times
    the lowest number, and a user that looks for infinities must see the same value as the sum. An
    infinity that the program intends is a constant, an input or a selected value, never a product.
    """
    targets = value.get_target_inputs()
    bounded = library.openvino().opset13.clamp(value, _RANGE.min, _RANGE.max)
    if value.get_node().get_type_name() == "Multiply":
        redirect(targets, bounded)
    return bounded


def _terms(read: Any, *, is_sum: bool) -> Iterator[Any]:
    """Yield the inputs that hold the terms of a sum, except constants; nothing if there is no sum.

    The search passes through nodes that move elements, and through the branches of ``Select``.
    """
    node = read.get_source_output().get_node()
    kind = node.get_type_name()
    if kind == "Add":
        for operand in node.inputs():
            yield from _terms(operand, is_sum=True)
    elif kind in _MOVES:
        yield from _terms(node.input(0), is_sum=is_sum)
    elif kind == "Select":
        for operand in node.inputs()[1:]:
            yield from _terms(operand, is_sum=is_sum)
    elif is_sum and constant_of(node) is None:  # the program intends an infinity in a constant
        yield read


def _is_of_a_product(node: Any) -> bool:
    """True if a value is computed from a matrix product, as scores are."""
    origins = reachable(node, sources)
    return "MatMul" in kinds_of([node, *origins])
