"""Calls that OpenVINO computes differently from torch without a warning; torch runs them.

OpenVINO's plugin for the CPU (2026.4) computes int64 in 32 bits (openvinotoolkit/openvino#37766,
#37957, #35890). It computes most of int32 and all of float64 in single precision (#37968), whatever
the dtypes of the model are. Its small integers saturate, where torch's wrap around. No property of
OpenVINO tells this. ``test_openvino.py`` tells when it changes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
import torch.fx

from composer import _torch
from composer.backends.openvino.lookups import positions_within
from composer.graphs.nodes import tensors_of
from composer.lowering.export.onnx import why_not

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

_OTHERWISE = {
    "aten::amax": "an infinity becomes the largest number",
    "aten::amin": "an infinity becomes the largest number",
    "aten::max": "an infinity becomes the largest number",
    "aten::min": "an infinity becomes the largest number",
    "aten::fmod": "a rest is taken from a rounded quotient",
    "aten::maximum": "NaN gets lost",
    "aten::minimum": "NaN gets lost",
    "aten::sort": "NaN upsets the order of the others",
    "aten::topk": "NaN upsets the order of the others",
}
"""Operators that OpenVINO computes differently on values that models use, and how.

Infinity is such a value: masks contain it.
"""

_CLAMPS = frozenset({"aten::clamp", "aten::clamp_min", "aten::clamp_max"})

_AVERAGES = frozenset({"aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d"})

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
    rules = (why_not, inexact, _otherwise, _arithmetic_on_sizes, _nothing, _open_bound)
    return next((why for rule in rules if (why := rule(node))), None)


def _inexact(node: torch.fx.Node, weights: Mapping[str, torch.Tensor]) -> str | None:
    values = (each for each in _values(node, weights) if not _is_number(each, node))
    dtypes = {each.dtype for each in values} - _EXACT
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return f"OpenVINO computes {names} otherwise" if names else None


def _is_number(value: torch.Tensor, node: torch.fx.Node) -> bool:
    """True for a float64 scalar beside float32 tensors; torch reads it in float32, too.

    Dynamo (torch 2.15) captures a number from Python's ``random`` like this.
    """
    is_double = value.dtype is torch.float64 and value.dim() == 0
    return is_double and all(each.dtype is torch.float32 for each in _results(node))


def _otherwise(node: torch.fx.Node) -> str | None:
    name = _torch.operators.operator_name(node.target)
    if name in _TRUTHS and all(each.dtype is torch.bool for each in tensors_of(node)):
        operands = (each.dtype for source in node.all_input_nodes for each in tensors_of(source))
        return "NaN is taken for false" if any(t.is_floating_point for t in operands) else None
    if name in _POSITIONS and all(each.dtype is torch.int64 for each in _results(node)):
        return None  # no value is read
    rules = (_counted_averages, _padded_maxima, _large_windows, _dynamic_kernel, _padded_points)
    return _OTHERWISE.get(name) or next((why for rule in rules if (why := rule(node, name))), None)


def _counted_averages(node: torch.fx.Node, name: str) -> str | None:
    if name not in _AVERAGES or not _torch.operators.argument(node, "ceil_mode"):
        return None
    counted = _torch.operators.argument(node, "count_include_pad") and any(
        _torch.operators.argument(node, "padding")
    )
    return "the last window is counted whole" if counted else None


def _large_windows(node: torch.fx.Node, name: str) -> str | None:
    """Refuse windows that may be larger than the input.

    OpenVINO (2026.4) rejects such a window, or the process crashes.
    """
    if name not in _POOLS | _AVERAGES or not _torch.operators.argument(node, "ceil_mode"):
        return None
    (given,) = tensors_of(node.all_input_nodes[0])
    dims = len(_torch.operators.argument(node, "kernel_size"))
    is_dynamic = not all(isinstance(size, int) for size in given.shape[-dims:])
    return "a window may be larger than a dynamic size" if is_dynamic else None


def _padded_maxima(node: torch.fx.Node, name: str) -> str | None:
    """Refuse padded maximum pools of dynamic sizes that round output sizes up.

    In OpenVINO (2026.4) the positions are empty, and for the values the process crashes, at once or
    a little later.
    """
    if name not in _POOLS or not _torch.operators.argument(node, "ceil_mode"):
        return None
    sizes = (size for each in tensors_of(node.all_input_nodes[0]) for size in each.shape)
    is_dynamic = not all(isinstance(size, int) for size in sizes)
    ends = is_dynamic and any(_torch.operators.argument(node, "padding"))
    return "padded windows of dynamic sizes may end the process" if ends else None


def _padded_points(node: torch.fx.Node, name: str) -> str | None:
    """Refuse padded convolutions with a kernel of size one and a stride.

    OpenVINO (2026.4) lets the operation before the convolution compute only the elements that the
    convolution reads. It then ignores the padding, and counts from the first element that is not
    padding.
    """
    if name != "aten::convolution" or any(size != 1 for size in _kernel(node)[2:]):
        return None
    steps = zip(
        _torch.operators.argument(node, "stride"),
        _torch.operators.argument(node, "padding"),
        strict=True,
    )
    skips = any(stride != 1 and padding != 0 for stride, padding in steps)
    return "the padding is counted after places were left out" if skips else None


def _dynamic_kernel(node: torch.fx.Node, name: str) -> str | None:
    """Refuse kernels of dynamic sizes: OpenVINO compiles no model that contains one."""
    if name != "aten::convolution" or all(isinstance(size, int) for size in _kernel(node)):
        return None
    return "OpenVINO has no kernels of dynamic sizes"


def _kernel(node: torch.fx.Node) -> torch.Size:
    """The sizes of a convolution's weight."""
    (weight,) = tensors_of(_torch.operators.argument(node, "weight"))
    return weight.shape


def _arithmetic_on_sizes(node: torch.fx.Node) -> str | None:
    """Refuse arithmetic on sizes: Python's integers have no limit, OpenVINO's have 32 bits.

    The result becomes an input of the model, and is checked there.
    """
    of_size = node.target is torch.ops.aten.sym_size.int
    is_number = isinstance(node.meta.get("val"), torch.SymInt) and not of_size
    return "OpenVINO computes sizes in 32 bits" if is_number else None


def _nothing(node: torch.fx.Node) -> str | None:
    """Refuse results that may be empty.

    OpenVINO divides integers by the number of elements; a division by zero ends the process.
    """
    empty = any(map(_torch.symbols.may_be_empty, _results(node)))
    return "OpenVINO divides by the number of elements, which may be zero" if empty else None


def _open_bound(node: torch.fx.Node) -> str | None:
    """Refuse a ``Clip`` with one bound.

    The reader makes the other bound with the dtype of the input. If the input comes from a node
    that the reader does not convert, there is no dtype, and the reader crashes. A bound for each
    element becomes a maximum or a minimum.
    """
    if _torch.operators.operator_name(node.target) not in _CLAMPS:
        return None
    is_open = node.target is not torch.ops.aten.clamp.default or any(
        _torch.operators.argument(node, bound) is None for bound in ("min", "max")
    )
    return "OpenVINO's reader may crash on a single bound" if is_open else None


def _values(node: torch.fx.Node, weights: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the operands and the used results of a call, except those that are positions."""
    name = _torch.operators.operator_name(node.target)
    if _copies_positions(node):
        return
    known = positions_within(node, weights, functools.partial(_comes_from_outside, weights=weights))
    sources = (source for source in node.all_input_nodes if source not in known)
    operands = (each for source in sources for each in tensors_of(source))
    for exempt, values in ((_UNCHECKED, operands), (_POSITIONS, _results(node))):
        for each in values:
            if not (name in exempt and each.dtype is torch.int64):
                yield each


def _comes_from_outside(node: torch.fx.Node, weights: Mapping[str, torch.Tensor]) -> bool:
    """True if a value is an input of the graph, or torch computes it."""
    return node.op == "placeholder" or why_not_here(node, weights) is not None


def _copies_positions(node: torch.fx.Node) -> bool:
    """True if a call copies positions that are a constant, for operators in ``_UNCHECKED``.

    Constant folding makes them of an interpolation with fixed sizes.
    """
    source = node.args[0] if node.target is torch.ops.aten.clone.default else None
    if not isinstance(source, torch.fx.Node) or source.op != "get_attr":
        return False
    readers = {_torch.operators.operator_name(user.target) for user in node.users}
    return source.meta["val"].dtype is torch.int64 and bool(readers) and readers <= _UNCHECKED


def _results(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """Yield the results of a call; of a tuple, only the elements that have users."""
    if not isinstance(node.meta.get("val"), tuple | list):
        yield from tensors_of(node)
        return
    for user in node.users:
        if user.target is operator.getitem and user.users:
            yield from tensors_of(user)
