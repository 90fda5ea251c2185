"""Rotary embeddings, which OpenVINO computes with a fused kernel.

OpenVINO (2026.4) uses the kernel for any ``x * a + cat(-x2, x1) * b``, with two faults:

- The kernel reads as many elements of ``a`` and ``b`` as a row of ``x`` has. If ``a`` or ``b`` has
  one element for the whole row, the kernel reads memory behind it. The result is wrong, or the
  process crashes.
- The pattern does not check where ``x1`` and ``x2`` lie in the row. The kernel always swaps the
  halves of the row and negates the second one. This is wrong for parts that are not halves, and for
  ``cat(-x1, x2)``.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy

from composer.backends.openvino import library

_SUMS = {"Add", "Subtract"}
_PRODUCTS = {"Multiply", "Divide"}
_ROTATED = "Concat"
_NEGATED = {"Negative", "Multiply"}
_PARTS = {"Slice", "Split", "VariadicSplit"}
_SAME_NUMBER = {"Convert", "Reshape"}


def line_up_rotations(model: Any) -> None:
    """Prevent both faults, by repeated factors and by a changed form of ``cat(-x2, x1)``.

    A factor with one element for a row is repeated to one for each element. A concatenation that
    does not seem to swap the halves of a row is written so that OpenVINO's pattern does not match.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay the same.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() not in _SUMS:
            continue
        products = _products(node)
        read = (value.get_node() for each in products for value in each.input_values())
        rotated = [each for each in read if each.get_type_name() == _ROTATED]
        for each in rotated:
            if _seems_rotated(each) and not _swaps_halves(each, _width(node.output(0))):
                _tell_apart(each)
        if rotated:
            for product in products:
                _widen(product)
    model.validate_nodes_and_infer_types()


def _seems_rotated(rotated: Any) -> bool:
    """True if OpenVINO may see ``cat(-x2, x1)``: a product or negation, then part of a row."""
    kinds = [value.get_node().get_type_name() for value in rotated.input_values()]
    return len(kinds) == 2 and kinds[0] in _NEGATED and kinds[1] in _PARTS


def _swaps_halves(rotated: Any, row: int | None) -> bool:
    """True if it may be the second half of a row before the first."""
    _, last = rotated.input_values()
    widths = {_width(part) for part in rotated.inputs()}
    if None in widths and row is not None:
        widths = {_taken(value, row) for value in rotated.input_values()}
    if len(widths) > 1 or None in widths:
        return False
    begin = last.get_index() if "Split" in last.get_node().get_type_name() else _bound(last, 1)
    return begin in (0, None)


def _taken(part: Any, row: int) -> int | None:
    """Return how many elements of a row a slice takes, negated or not; ``None`` if unknown."""
    if part.get_node().get_type_name() == "Negative":
        part = part.get_node().input_value(0)
    begin, end = _bound(part, 1), _bound(part, 2)
    if begin is None or end is None:
        return None
    return len(range(row)[begin:end])


def _bound(part: Any, index: int) -> int | None:
    """Return the begin or end of a slice; ``None`` if unknown or not a slice."""
    node = part.get_node()
    if node.get_type_name() != "Slice":
        return None
    node = node.input_value(index).get_node()
    while node.get_type_name() in _SAME_NUMBER:
        node = node.input_value(0).get_node()
    return int(node.get_data().item()) if node.get_type_name() == "Constant" else None


def _tell_apart(rotated: Any) -> None:
    """Negate each part of a concatenation, and negate the result again."""
    opset13 = library.openvino().opset13
    targets = rotated.output(0).get_target_inputs()
    for part in rotated.inputs():
        part.replace_source_output(opset13.negative(part.get_source_output()).output(0))
    whole = opset13.negative(rotated).output(0)
    for target in targets:
        target.replace_source_output(whole)


def _products(node: Any) -> list[Any]:
    """Return the products that a sum adds, and the products that are factors of those."""
    found, known = [node], dict[str, Any]()
    while found:
        for value in found.pop().input_values():
            product = value.get_node()
            name = product.friendly_name
            if product.get_type_name() in _PRODUCTS and name not in known:
                known[name] = product
                found.append(product)
    return list(known.values())


def _widen(product: Any) -> None:
    """Repeat a factor with one element for each row, if rows of the other factor are longer."""
    opset13 = library.openvino().opset13
    for narrow, wide in itertools.permutations(product.inputs()):
        if _width(narrow) == 1 and _width(wide) != 1:
            source, other = narrow.get_source_output(), wide.get_source_output()
            sizes = opset13.shape_of(other)
            row = opset13.gather(sizes, numpy.array([-1]), numpy.array(0))
            ones = numpy.ones(max(source.get_partial_shape().rank.get_length() - 1, 0), numpy.int64)
            repeats = opset13.concat([opset13.constant(ones), row], 0) if ones.size else row
            narrow.replace_source_output(opset13.tile(source, repeats).output(0))


def _width(factor: Any) -> int | None:
    """Return the number of elements in a row; ``None`` if unknown."""
    shape = factor.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    if not shape.rank.get_length():
        return 1
    return None if shape[-1].is_dynamic else int(shape[-1].get_length())
