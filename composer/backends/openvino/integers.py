"""Integers that OpenVINO computes exactly, although it computes them in single precision.

These are those of quantized models: 8-bit numbers, and sums of their products. Float32 holds all
integers up to 2**24. Larger sums are rounded, which does no harm where the program itself converts
them to floating-point numbers. OpenVINO's small integers saturate, so a result must be known to lie
within its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from composer.backends.onnx_engine import argument, operator_name, tensors_of

_HELD = 2**24
"""Float32 holds every integer up to this one."""

_DTYPES = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_SMALL = frozenset({torch.int8, torch.uint8})

_MOVES = frozenset(
    {"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::t", "aten::transpose"}
    | {"aten::permute", "aten::clone", "aten::expand", "aten::unsqueeze", "aten::squeeze"}
    | {"aten::slice", "aten::select", "aten::alias", "aten::detach", "aten::repeat"}
)
_CONVERSION = "aten::_to_copy"
_SUMS = frozenset({"aten::add", "aten::sub"})
_COUNTING = _MOVES | _SUMS | {_CONVERSION, "aten::mul", "aten::_int_mm", "aten::sum"}
_DEQUANTIZING = frozenset(
    {"quantized_decomposed::dequantize_per_tensor", "quantized_decomposed::dequantize_per_channel"}
)

Range = tuple[float, float]
"""The least and the largest value that a tensor may have."""

_UNKNOWN: Range = (-math.inf, math.inf)


def inexact(node: torch.fx.Node, values: Iterable[torch.Tensor]) -> set[torch.dtype]:
    """Return the dtypes among these values of a call, without those that it computes exactly.

    Args:
        node: The call.
        values: Its operands and results, as far as their dtypes count.
    """
    dtypes = {value.dtype for value in values}
    name = _name_of(node)
    if name in _DEQUANTIZING:  # the zero points are read in the dtype of the numbers
        return dtypes - _DTYPES
    if name not in _COUNTING:
        return dtypes
    operands = [each for each in node.all_input_nodes if not _is_counted(each)]
    found = {value.dtype for each in operands for value in tensors_of(each)}
    if not _is_exact_result(node):
        found |= {value.dtype for value in tensors_of(node)}
    return dtypes & found


def _is_counted(node: torch.fx.Node) -> bool:
    """True if OpenVINO has the values of a node as they are in torch."""
    dtype = _dtype_of(node)
    if dtype is torch.float64:
        return _is_widened(node)
    return dtype in _DTYPES and _is_held(_range_of(node) or _UNKNOWN, node)


def _is_exact_result(node: torch.fx.Node) -> bool:
    """True if a call of an operator that counts has the result that it has in torch."""
    dtype = _dtype_of(node)
    if dtype is torch.float64:
        return _is_widened(node)
    if dtype not in _DTYPES:
        return False
    limits = torch.iinfo(dtype)
    found = _computed_range(node) or _UNKNOWN
    return _is_held(found, node) and _is_within(found, limits.min, limits.max)


def _is_held(found: Range, node: torch.fx.Node) -> bool:
    if _is_within(found, -_HELD, _HELD):
        return True
    return found != _UNKNOWN and _ends_in_floats(node)


def _is_within(found: Range, least: float, most: float) -> bool:
    return least <= found[0] and found[1] <= most


def _is_widened(node: torch.fx.Node) -> bool:
    """True if the values of a node in float64 are a conversion of float32."""
    if _name_of(node) != _CONVERSION:
        return False
    return _dtype_of(node.all_input_nodes[0]) is torch.float32


def _ends_in_floats(node: torch.fx.Node) -> bool:
    """True if all that becomes of a sum is a sum, and then a floating-point number."""
    for user in node.users:
        name, dtype = _name_of(user), _dtype_of(user)
        if name == _CONVERSION and dtype is not None and dtype.is_floating_point:
            continue
        if name not in _SUMS | _MOVES or not _ends_in_floats(user):
            return False
    return True


def _range_of(value: Any) -> Range | None:
    """Return the range of a number or of the values of a node, if it is known."""
    if isinstance(value, bool | int | float):
        return value, value
    dtype = _dtype_of(value) if isinstance(value, torch.fx.Node) else None
    if dtype is None:
        return None
    if dtype in _SMALL:
        limits = torch.iinfo(dtype)
        return limits.min, limits.max
    return _computed_range(value)


def _computed_range(node: torch.fx.Node) -> Range | None:
    """Return the range of a call's result, from its operator and its operands."""
    name, dtype = _name_of(node), _dtype_of(node)
    if name in _MOVES | {_CONVERSION}:
        return _range_of(node.args[0])
    if name == "aten::clamp":
        return _of_clamp(node)
    if name in ("aten::full", "aten::full_like"):
        return _range_of(node.args[1])
    if dtype is None or dtype.is_floating_point:
        return None  # sums of floats are no integers, and there are many
    if name in _SUMS | {"aten::mul"}:
        return _of_two(node)
    if name == "aten::_int_mm":
        return _of_product(node)
    return _of_sum(node) if name == "aten::sum" else None


def _of_clamp(node: torch.fx.Node) -> Range | None:
    bounds = argument(node, "min"), argument(node, "max")
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in bounds):
        return None
    return bounds


def _of_two(node: torch.fx.Node) -> Range | None:
    one, other = _range_of(node.args[0]), _range_of(node.args[1])
    if one is None or other is None or argument(node, "alpha") not in (None, 1):
        return None
    name = _name_of(node)
    if name == "aten::add":
        return one[0] + other[0], one[1] + other[1]
    if name == "aten::sub":
        return one[0] - other[1], one[1] - other[0]
    products = [a * b for a in one for b in other]
    return min(products), max(products)


def _of_product(node: torch.fx.Node) -> Range | None:
    left, right = map(_range_of, node.args)  # all_input_nodes has the factor of a square once
    inner = node.all_input_nodes[0].meta["val"].shape[1]
    if left is None or right is None or not isinstance(inner, int):
        return None
    products = [a * b * inner for a in left for b in right]
    return min(products), max(products)


def _of_sum(node: torch.fx.Node) -> Range | None:
    (source,) = node.all_input_nodes
    found, count = _range_of(source), source.meta["val"].numel()
    if found is None or not isinstance(count, int):
        return None
    return min(found[0] * count, 0), max(found[1] * count, 0)


def _name_of(node: torch.fx.Node) -> str:
    """Return the name of a call's operator; empty if it reads memory as another dtype."""
    is_cast_of_memory = node.target is torch.ops.aten.view.dtype
    return "" if is_cast_of_memory else operator_name(node.target)


def _dtype_of(node: torch.fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
