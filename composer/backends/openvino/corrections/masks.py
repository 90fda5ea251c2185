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

import numpy
import torch

from composer.backends.openvino import library

_RANGE = torch.finfo(torch.bfloat16)
_MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Broadcast"}


def bound_masks(model: Any) -> None:
    """Limit constants, and terms that are added to attention scores, to the range of bfloat16.

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
    """Replace a constant outside the range of bfloat16 by the nearest number within it."""
    opset13 = library.openvino().opset13
    bound = _RANGE.max if number.data.item() > 0 else _RANGE.min
    shape = number.get_output_shape(0)
    number.output(0).replace(opset13.constant(numpy.full(shape, bound, "float32")).output(0))


def _bounded(source: Any) -> Any:
    """Return a term that is added to scores, clamped to the range of bfloat16.

    If the term is a product, all its users read the clamped value. Such a product is a mask times
    the lowest number, and a user that looks for infinities must see the same value as the sum. An
    infinity that the program intends is a constant, an input or a selected value, never a product.
    """
    opset13 = library.openvino().opset13
    is_scaled = source.get_node().get_type_name() == "Multiply"
    readers = source.get_target_inputs() if is_scaled else ()
    bounded = opset13.clamp(source, _RANGE.min, _RANGE.max).output(0)
    for reader in readers:
        reader.replace_source_output(bounded)
    return bounded


def _is_beyond(node: Any) -> bool:
    """True for a single float32 constant that is finite and outside the range of bfloat16."""
    if node.get_type_name() != "Constant" or node.data.dtype != "float32" or node.data.size != 1:
        return False
    return bool(_RANGE.max < abs(node.data.item()) < math.inf)


def _terms(read: Any, *, is_sum: bool) -> Iterator[Any]:
    """Yield the inputs that hold the terms of a sum, except constants; nothing if there is no sum.

    The search passes through nodes that move elements, and through the branches of ``Select``.
    """
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
    """True for a constant, possibly converted to another dtype.

    An infinity in a constant is intended by the program.
    """
    if node.get_type_name() in {"Convert", "ConvertLike"}:
        return _is_constant(node.input_value(0).get_node())
    return bool(node.get_type_name() == "Constant")


def _is_of_a_product(node: Any) -> bool:
    """True if a value is computed from a matrix product, as scores are."""
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
