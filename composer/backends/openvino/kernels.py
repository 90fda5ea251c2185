"""Calls that OpenVINO computes differently from torch without a warning; torch runs them.

OpenVINO's plugin for the CPU (2026.4) computes int64 in 32 bits (openvinotoolkit/openvino#37766,
#37957, #35890). It computes most of int32 and all of float64 in single precision (#37968), whatever
the dtypes of the model are. Its small integers saturate, where torch's wrap around. No property of
OpenVINO tells this. ``test_openvino.py`` tells when it changes.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

import torch
import torch.fx

from composer.backends.onnx_engine import (
    are_static,
    argument,
    dtype_names,
    may_be_empty,
    operator_name,
    tensors_of,
    why_not,
)
from composer.backends.openvino.integers import inexact
from composer.backends.openvino.lookups import positions_within

_EXACT = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.bool})

_POOLS = frozenset({"aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices"})

_POSITIONS = frozenset({"aten::argmax", "aten::argmin", "aten::max", "aten::min"})
"""Operators whose int64 results are positions in a tensor, which fit into 32 bits.

Pools are not among them: for a window that holds only minus infinity OpenVINO's position is wrong.
"""

_UNCHECKED = frozenset({"aten::_unsafe_index"})
"""Operators that read int64 operands as positions, and whose positions always exist.

Interpolation is made of them. For all other operators, eager raises for a position outside the
tensor, and OpenVINO does not.
"""

_AVERAGES = frozenset({"aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d"})

_CLAMPS = frozenset({"aten::clamp", "aten::clamp_min", "aten::clamp_max"})

_TRUTHS = frozenset({"aten::_to_copy", "aten::logical_not", "aten::logical_and"})
_TRUTHS |= {"aten::logical_or", "aten::logical_xor", "aten::all", "aten::any"}


def why_not_here(
    node: torch.fx.Node, weights: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> str | None:
    """Return why torch must run a call, without asking OpenVINO's reader; ``None`` if it need not.

    Args:
        node: The call.
        weights: The weights that the engine takes in, by the names of their inputs.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return why_not(node)
    inexact = functools.partial(_inexact, weights=weights)
    for rule in (why_not, inexact, _otherwise, _arithmetic_on_sizes, _nothing):
        why = rule(node)
        if why:
            return why
    return None


def _inexact(node: torch.fx.Node, weights: Mapping[str, torch.Tensor]) -> str | None:
    values = _values(node, weights)
    if all(value.dtype is torch.float32 for value in _results(node)):
        # Torch reads a float64 number in float32, too. Dynamo (torch 2.15) captures a number from
        # Python's ``random`` like this.
        values = [value for value in values if value.dim() or value.dtype is not torch.float64]
    dtypes = inexact(node, values) - _EXACT
    if not dtypes:
        return None
    return f"OpenVINO computes {dtype_names(dtypes)} otherwise"


def _otherwise(node: torch.fx.Node) -> str | None:
    """Return how OpenVINO computes a call differently, for the operators that are known."""
    name = operator_name(node.target)
    for operators, applies, why in _RULES:
        if name in operators and applies(node):
            return why
    return None


def _reads_values(node: torch.fx.Node) -> bool:
    """True unless only the positions of a maximum or minimum are used."""
    return any(value.dtype is not torch.int64 for value in _results(node))


def _reads_nan_as_false(node: torch.fx.Node) -> bool:
    """True if floating-point operands are read as booleans."""
    operands = itertools.chain.from_iterable(map(tensors_of, node.all_input_nodes))
    reads_numbers = any(value.is_floating_point() for value in operands)
    return reads_numbers and all(value.dtype is torch.bool for value in tensors_of(node))


def _is_of_infinities(node: torch.fx.Node) -> bool:
    """True for an extreme that may be that of a row of infinities which are all of the other sign.

    A scale is chosen from an extreme that is cut off at zero.
    """
    side = _SIDES[operator_name(node.target)]
    users = [user for user in node.users if not operator_name(user.target).endswith("_like")]
    return not all(_cuts_at_zero(user, *side) for user in users)


_SIDES = {"aten::amax": ("min", "aten::maximum", 1), "aten::amin": ("max", "aten::minimum", -1)}
"""For each extreme, what cuts it off at zero: a bound of ``clamp``, and an operator; its sign."""


def _cuts_at_zero(node: torch.fx.Node, bound: str, extreme: str, sign: int) -> bool:
    """True for the larger one of a number and zero; or for the smaller one."""
    if operator_name(node.target) == "aten::clamp":
        number = argument(node, bound)
        return isinstance(number, int | float) and number * sign >= 0
    return _is_cut(node, extreme)


def _may_lose_nan(node: torch.fx.Node) -> bool:
    """True for a maximum or minimum of which OpenVINO's result is not NaN where it should be.

    With zeros it is like ``relu``, for which the option ``keeps_nan`` decides. What such a maximum
    returns is never NaN.
    """
    return not _is_cut(node) and not all(map(_is_cut, node.all_input_nodes))


def _is_cut(node: torch.fx.Node, *names: str) -> bool:
    """True for a maximum or minimum with zeros, also if it is negated; or for these operators."""
    if operator_name(node.target) == "aten::neg":
        return _is_cut(node.all_input_nodes[0], *names)
    is_extreme = operator_name(node.target) in (names or ("aten::maximum", "aten::minimum"))
    return is_extreme and any(map(_is_zero, node.all_input_nodes))


def _is_zero(node: torch.fx.Node) -> bool:
    is_filled = operator_name(node.target) in ("aten::full", "aten::full_like")
    number = node.args[1] if is_filled else None
    return operator_name(node.target) == "aten::zeros_like" or bool(number == 0)


def _pads_and_rounds_up(node: torch.fx.Node) -> bool:
    return bool(argument(node, "ceil_mode")) and any(argument(node, "padding"))


def _counts_padding(node: torch.fx.Node) -> bool:
    """True for an average with padding that is counted, and with output sizes rounded up."""
    return _pads_and_rounds_up(node) and bool(argument(node, "count_include_pad"))


def _has_large_windows(node: torch.fx.Node) -> bool:
    """True for windows that may be larger than the input.

    OpenVINO (2026.4) rejects such a window, or the process crashes.
    """
    (x,) = tensors_of(node.all_input_nodes[0])
    spatial = x.shape[-len(argument(node, "kernel_size")) :]
    return bool(argument(node, "ceil_mode")) and not are_static(spatial)


def _has_padded_windows(node: torch.fx.Node) -> bool:
    """True for padded maximum pools of dynamic sizes that round output sizes up.

    In OpenVINO (2026.4) the positions are empty, and for the values the process crashes, at once or
    a little later.
    """
    (x,) = tensors_of(node.all_input_nodes[0])
    return _pads_and_rounds_up(node) and not are_static(x.shape)


def _skips_padding(node: torch.fx.Node) -> bool:
    """True for padded convolutions with a kernel of size one and a stride.

    OpenVINO (2026.4) lets the operation before the convolution compute only the elements that the
    convolution reads. It then ignores the padding, and counts from the first element that is not
    padding.
    """
    if set(_kernel(node)[2:]) != {1}:
        return False
    steps = zip(argument(node, "stride"), argument(node, "padding"), strict=True)
    return any(stride != 1 and padding != 0 for stride, padding in steps)


def _has_dynamic_kernel(node: torch.fx.Node) -> bool:
    return not are_static(_kernel(node))


def _kernel(node: torch.fx.Node) -> torch.Size:
    """The sizes of a convolution's weight."""
    (weight,) = tensors_of(argument(node, "weight"))
    return weight.shape


def _has_one_bound(node: torch.fx.Node) -> bool:
    """True for a clamp to one bound, which the exporter writes as ``Clip``.

    The reader makes the other bound with the dtype of the input. If the input comes from a node
    that the reader does not convert, there is no dtype, and the reader crashes. A bound for each
    element becomes a maximum or a minimum.
    """
    if node.target is not torch.ops.aten.clamp.default:
        return True
    return argument(node, "min") is None or argument(node, "max") is None


def _averages_empty_regions(node: torch.fx.Node) -> bool:
    """True for means over regions with as many points as a region is large, which may be none."""
    return bool(argument(node, "aligned") and argument(node, "sampling_ratio") <= 0)


def _always(_: torch.fx.Node) -> bool:
    return True


_RULES: tuple[tuple[Collection[str], Callable[[torch.fx.Node], bool], str], ...] = (
    ({"aten::amax", "aten::amin"}, _is_of_infinities, "an infinity becomes the largest number"),
    ({"aten::max", "aten::min"}, _reads_values, "an infinity becomes the largest number"),
    ({"aten::fmod"}, _always, "a rest is taken from a rounded quotient"),
    ({"aten::maximum", "aten::minimum"}, _may_lose_nan, "NaN gets lost"),
    ({"aten::sort", "aten::topk"}, _always, "NaN upsets the order of the others"),
    (_AVERAGES, _counts_padding, "the last window is counted whole"),
    (_POOLS, _has_padded_windows, "padded windows of dynamic sizes may end the process"),
    (_POOLS | _AVERAGES, _has_large_windows, "a window may be larger than a dynamic size"),
    ({"aten::convolution"}, _has_dynamic_kernel, "OpenVINO has no kernels of dynamic sizes"),
    ({"aten::convolution"}, _skips_padding, "the padding is counted after places were left out"),
    (_CLAMPS, _has_one_bound, "OpenVINO's reader may crash on a single bound"),
    ({"torchvision::roi_align"}, _averages_empty_regions, "the mean of no points is NaN"),
    (_TRUTHS, _reads_nan_as_false, "NaN is taken for false"),
)
"""Operators, when OpenVINO computes them differently on values that models use, and how.

Infinity is such a value: masks contain it.
"""


def _arithmetic_on_sizes(node: torch.fx.Node) -> str | None:
    """Refuse arithmetic on sizes: Python's integers have no limit, OpenVINO's have 32 bits.

    The result becomes an input of the model, and is checked there.
    """
    if node.target is torch.ops.aten.sym_size.int:
        return None
    is_size = isinstance(node.meta.get("val"), torch.SymInt)
    return "OpenVINO computes sizes in 32 bits" if is_size else None


def _nothing(node: torch.fx.Node) -> str | None:
    """Refuse results that may be empty.

    OpenVINO divides integers by the number of elements; a division by zero ends the process.
    """
    empty = any(map(may_be_empty, _results(node)))
    return "OpenVINO divides by the number of elements, which may be zero" if empty else None


def _values(node: torch.fx.Node, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the operands and the used results of a call, except those that are positions."""
    if _copies_positions(node):
        return []
    known = positions_within(node, weights, functools.partial(_comes_from_outside, weights=weights))
    sources = [source for source in node.all_input_nodes if source not in known]
    operands = list(itertools.chain.from_iterable(map(tensors_of, sources)))
    results = list(_results(node))
    name = operator_name(node.target)
    if name in _UNCHECKED:
        operands = _without_int64(operands)
    if name in _POSITIONS:
        results = _without_int64(results)
    return operands + results


def _without_int64(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value for value in values if value.dtype is not torch.int64]


def _comes_from_outside(node: torch.fx.Node, weights: Mapping[str, torch.Tensor]) -> bool:
    """True if a value is an input of the graph, or torch computes it."""
    return node.op == "placeholder" or why_not_here(node, weights) is not None


def _copies_positions(node: torch.fx.Node) -> bool:
    """True if a call copies positions that are a constant, for operators in ``_UNCHECKED``.

    Constant folding makes them of an interpolation with fixed sizes.
    """
    if node.target is not torch.ops.aten.clone.default:
        return False
    (source,) = node.all_input_nodes
    if source.op != "get_attr" or source.meta["val"].dtype is not torch.int64:
        return False
    readers = {operator_name(user.target) for user in node.users}
    return bool(readers) and readers <= _UNCHECKED


def _results(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """Yield the results of a call; of a tuple, only the elements that have users."""
    if not isinstance(node.meta.get("val"), tuple | list):
        yield from tensors_of(node)
        return
    for user in node.users:
        if user.target is operator.getitem and user.users:
            yield from tensors_of(user)
