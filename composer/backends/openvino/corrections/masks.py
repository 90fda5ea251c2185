"""Masks of attention, where OpenVINO computes in bfloat16.

Programs mask by the least number of float32, which is beyond the range of bfloat16: rounded to it
(2026.4), it is minus infinity, and a row that is masked everywhere is NaN, where in float32 it is
as if nothing in it were masked. From there NaN goes on to rows that are not masked at all. Zero
times it, where nothing is masked, is NaN as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from composer.backends.openvino import library

_RANGE = torch.finfo(torch.bfloat16)
_MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Broadcast"}


def bound_masks(model: Any) -> None:
    """Keep numbers, and what is added to scores of attention, within the range of bfloat16.

    Args:
        model: A model of OpenVINO's, changed in place.
    """
    for number in filter(_is_beyond, model.get_ops()):
        _bound_number(number)
    bounded: dict[tuple[str, int], Any] = {}
    for softmax in [node for node in model.get_ops() if node.get_type_name() == "Softmax"]:
        for term in list(_terms(softmax.input(0), is_sum=False)):
            source = term.get_source_output()
            key = source.get_node().friendly_name, source.get_index()
            if key not in bounded and not _is_of_a_product(source.get_node()):
                bounded[key] = _bounded(source)
            if key in bounded:
                term.replace_source_output(bounded[key])


def _bound_number(number: Any) -> None:
    """Put the last number within the range in place of a constant beyond it."""
    opset13 = library.openvino().opset13
    bound = _RANGE.max if number.data.item() > 0 else _RANGE.min
    shape = number.get_output_shape(0)
    number.output(0).replace(opset13.constant(numpy.full(shape, bound, "float32")).output(0))


def _bounded(source: Any) -> Any:
    """What is added, within the range, for all that read it if it is a product.

    That is one with the least number, and whoever looks for infinities must see it as it is added;
    an infinity that the program means is given, or picked, not multiplied.
    """
    opset13 = library.openvino().opset13
    is_scaled = source.get_node().get_type_name() == "Multiply"
    readers = source.get_target_inputs() if is_scaled else ()
    bounded = opset13.clamp(source, _RANGE.min, _RANGE.max).output(0)
    for reader in readers:
        reader.replace_source_output(bounded)
    return bounded


def _is_beyond(node: Any) -> bool:
    """Whether it is a single number that float32 holds and bfloat16 does not."""
    if node.get_type_name() != "Constant" or node.data.dtype != "float32" or node.data.size != 1:
        return False
    return bool(_RANGE.max < abs(node.data.item()) < math.inf)


def _terms(read: Any, *, is_sum: bool) -> Iterator[Any]:
    """The inputs by which what is read was added up; none where it was not."""
    node = read.get_source_output().get_node()
    kind = node.get_type_name()
    if kind == "Add":
        for each in node.inputs():
            yield from _terms(each, is_sum=True)
    elif kind in _MOVES:
        yield from _terms(node.input(0), is_sum=is_sum)
    elif kind == "Select":
        for each in node.inputs()[1:]:
            yield from _terms(each, is_sum=is_sum)
    elif is_sum and not _is_constant(node):
        yield read


def _is_constant(node: Any) -> bool:
    """Whether it is a constant, or one in another type; an infinity there is meant."""
    if node.get_type_name() in {"Convert", "ConvertLike"}:
        return _is_constant(node.input_value(0).get_node())
    return bool(node.get_type_name() == "Constant")


def _is_of_a_product(node: Any) -> bool:
    """Whether a matrix product is among what it is computed from, as scores are."""
    found, known = [node], {node.friendly_name}
    while found:
        for value in found.pop().input_values():
            source = value.get_node()
            if source.get_type_name() == "MatMul":
                return True
            if source.friendly_name not in known:
                known.add(source.friendly_name)
                found.append(source)
    return bool(node.get_type_name() == "MatMul")
