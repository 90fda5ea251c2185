"""Rotary embeddings (RoPE), which OpenVINO computes with a fused kernel.

A rotary embedding is ``x * cos + rotated * sin``. Here ``rotated`` is
``cat(-second_half, first_half)``, and the halves are those of each row of ``x``, its last
dimension. OpenVINO (2026.4) uses its kernel for much that only resembles this, with two faults:

- The kernel reads as many elements of ``cos`` and ``sin`` as a row of ``x`` has. If the last
  dimension of one of them is 1, the kernel reads memory behind it. The result is wrong, or the
  process crashes.
- OpenVINO does not check where the two concatenated parts lie in the row. The kernel always swaps
  the halves of the row and negates the second one. This is wrong for parts that are not halves, and
  for ``cat(-first_half, second_half)``.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy

from composer.backends.openvino import library
from composer.backends.openvino.nodes import (
    PRODUCTS,
    SUMS,
    constant_of,
    insert_behind,
    kinds_of,
    nodes_of,
    rank_of,
    reachable,
    redirect,
    sizes_of,
    sources,
)

_NEGATED = {"Negative", "Multiply"}
_PARTS = {"Slice", "Split", "VariadicSplit"}


def line_up_rotations(model: Any) -> None:
    """Prevent both faults where a sum resembles a rotary embedding.

    A factor with one element for a row is repeated to one for each element. A concatenation that
    does not seem to swap the halves of a row is written so that OpenVINO does not recognise it.
    """
    for total in nodes_of(model, SUMS):
        products = _products(total)
        factors = itertools.chain.from_iterable(map(sources, products))
        concatenations = [factor for factor in factors if factor.get_type_name() == "Concat"]
        if not concatenations:
            continue
        row = _width(total.output(0))
        for concatenation in concatenations:
            if _resembles_rotated(concatenation) and not _swaps_halves(concatenation, row):
                _disguise(concatenation)
        for product in products:
            _repeat_factors(product)
    model.validate_nodes_and_infer_types()


def _products(total: Any) -> list[Any]:
    """Return the products that a sum adds, and the products that are factors of those."""

    def factors(node: Any) -> list[Any]:
        return [source for source in sources(node) if source.get_type_name() in PRODUCTS]

    return list(reachable(total, factors))


def _resembles_rotated(concatenation: Any) -> bool:
    """True for two parts of which OpenVINO takes the first for negated: any product counts."""
    kinds = kinds_of(sources(concatenation))
    return len(kinds) == 2 and kinds[0] in _NEGATED and kinds[1] in _PARTS


def _swaps_halves(concatenation: Any, row: int | None) -> bool:
    """True if the parts are equally long, and the second starts the row, or at a computed place.

    Args:
        concatenation: A node for which :func:`_resembles_rotated` is true.
        row: The number of elements in a row; ``None`` if unknown.
    """
    first, second = concatenation.input_values()
    length = _length(first, row)
    if length is None or length != _length(second, row):
        return False
    if second.get_node().get_type_name() == "Slice":
        return _bound(second.get_node(), 1) in (0, None)
    return bool(second.get_index() == 0)  # the first output of a split


def _length(part: Any, row: int | None) -> int | None:
    """Return how many elements of a row a part has; ``None`` if unknown.

    OpenVINO may not know it; then the bounds of a slice tell.
    """
    width = _width(part)
    if width is not None or row is None:
        return width
    node = part.get_node()
    if node.get_type_name() == "Negative":
        (node,) = sources(node)
    if node.get_type_name() != "Slice":
        return None
    begin, end = _bound(node, 1), _bound(node, 2)
    if begin is None or end is None:
        return None
    return len(range(row)[begin:end])


def _bound(part: Any, index: int) -> int | None:
    """Return the begin (input 1) or end (input 2) of a slice; ``None`` if it is computed."""
    bound = constant_of(part.input_value(index).get_node())
    return None if bound is None else int(bound.data.item())


def _disguise(concatenation: Any) -> None:
    """Negate each part of a concatenation, and negate the result again."""
    opset13 = library.openvino().opset13
    for part in concatenation.inputs():
        redirect([part], opset13.negative(part.get_source_output()))
    insert_behind(concatenation, opset13.negative)


def _repeat_factors(product: Any) -> None:
    """Repeat a factor with one element for each row, unless that is all the other factor has."""
    opset13 = library.openvino().opset13
    for factor, other in itertools.permutations(product.inputs()):
        if _width(factor) == 1 and _width(other) != 1:
            sizes = opset13.shape_of(other.get_source_output())
            row = opset13.gather(sizes, numpy.array([-1]), numpy.array(0))
            redirect([factor], opset13.tile(factor.get_source_output(), row))


def _width(value: Any) -> int | None:
    """Return the number of elements in a row; ``None`` if unknown."""
    rank = rank_of(value)
    if rank is None:
        return None
    width = sizes_of(value)[-1] if rank else 1
    return None if width == -1 else width
