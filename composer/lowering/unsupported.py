"""Where an ONNX translation does not say what the operator means: the calls to decline.

Found by running torch's own operator samples (``op_db``) through ONNX Runtime and comparing with
eager (torch 2.13, onnxscript 0.7, onnxruntime 1.31). Each rule is one reason; when upstream mends
it, ``tests/lowering/test_unsupported.py`` says so and the rule can go.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import tensors_of
from composer.lowering.operators.pools import miscounted
from composer.lowering.views import base_of, is_dense, is_view, reads_memory

aten = torch.ops.aten

_MEANS: dict[Any, int] = {aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}
_MAXIMA: dict[Any, int] = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
}
_WINDOW = ("kernel_size", "stride", "padding")
_SCATTERS = (aten.scatter_reduce.two,)
_DIVISIONS = ("aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod")
_HALF = torch.finfo(torch.float16)
_FACTORS = ("aten::mul", "aten::div")
_KEEP_EMPTY = ("aten::cat", "aten::clone", "aten::_to_copy", "aten::lift_fresh_copy")
_INEXACT_CONSTANTS = (
    *("hardswish", "hardsigmoid", "sinc", "upsample", "gelu", "softplus", "mish"),
    *("log10", "log2"),
)

_EXACT = 2**24
"""Up to which integers are exact in float32."""

_OTHERWISE = {
    "aten::_upsample_bilinear2d_aa": "scales and corners are read otherwise",
    "aten::_upsample_bicubic2d_aa": "scales and corners are read otherwise",
    "aten::_embedding_bag": "ONNX Runtime's optimizer crashes on it",
    "aten::_embedding_bag_forward_only": "ONNX Runtime's optimizer crashes on it",
    "aten::atan2": "zeros lose their sign",
    "aten::erfc": "it loses its tail",
    "aten::hamming_window": "its coefficients are others",
    "aten::hann_window": "its coefficients are others",
    "aten::blackman_window": "its coefficients are others",
    "aten::special_log_ndtr": "it overflows",
    "aten::special_erfcx": "it underflows",
    "aten::logaddexp": "it overflows",
    "aten::logaddexp2": "it overflows",
    "aten::logcumsumexp": "it overflows",
}
"""Operators whose translation is wrong on ordinary values."""

_LONG = {"aten::max", "aten::min", "aten::amax", "aten::amin", "aten::aminmax", "aten::sign"}
_LONG |= {"aten::sgn", "aten::prod", "aten::relu6", "aten::cummax"}
_LONG |= {"aten::cummin", "aten::maximum", "aten::minimum", "aten::clamp", "aten::relu"}
_LONG |= {"aten::clamp_min", "aten::clamp_max"}
"""Operators whose kernels are wrong for int64 beyond 32 bits, or saturate where torch wraps."""

_OF_INTEGERS = {
    "aten::pow": "powers of integers saturate",
    "aten::hardtanh": "bounds of integers are rounded to float32",
}
"""Operators whose kernels are wrong for all integers."""


def unsupported(node: torch.fx.Node) -> str | None:
    """Why the translation of this call would give other results than eager; ``None`` if not."""
    return next((why for rule in _RULES if (why := rule(node))), None)


def _attention_logarithms(node: torch.fx.Node) -> str | None:
    """The second result of attention, which only a backward reads, is translated as zeros."""
    second = (u for u in node.users if u.target is operator.getitem and u.args[1] == 1)
    read = "attention" in _torch.operators.operator_name(node.target) and any(
        u.users for u in second
    )
    return "the logarithms for its backward are left at zero" if read else None


def _divisor_override(node: torch.fx.Node) -> str | None:
    overridden = (
        node.target in _MEANS and _torch.operators.argument(node, "divisor_override") is not None
    )
    return "divisor_override is dropped" if overridden else None


def _windows_in_padding(node: torch.fx.Node) -> str | None:
    dims = (_MEANS | _MAXIMA).get(node.target)
    if dims is None or not _torch.operators.argument(node, "ceil_mode"):
        return None
    names = _WINDOW if node.target in _MEANS else (*_WINDOW, "dilation")
    window = [_torch.operators.argument(node, name) for name in names]
    sizes = next(_operands(node)).shape[-dims:]
    return "windows that begin in the padding" if miscounted(sizes, *window) else None


def _scatter_mean(node: torch.fx.Node) -> str | None:
    means = node.target in _SCATTERS and _torch.operators.argument(node, "reduce") == "mean"
    return "the mean is computed otherwise" if means else None


def _numbers_alone(node: torch.fx.Node) -> str | None:
    """``torch.div(16, 4)``: ONNX's ``Div`` makes an integer of two."""
    if (
        not isinstance(node.target, _torch.operators.OpOverload)
        or node.all_input_nodes
        or not node.args
    ):
        return None
    wants = node.target._schema.arguments[0].type
    given = isinstance(node.args[0], int | float) and wants.isSubtypeOf(torch.TensorType.get())
    return "a tensor of numbers alone" if given else None


def _otherwise(node: torch.fx.Node) -> str | None:
    return _OTHERWISE.get(_torch.operators.operator_name(node.target))


def _dynamic_squeeze(node: torch.fx.Node) -> str | None:
    """A size that is one in the first call only."""
    if _torch.operators.operator_name(node.target) != "aten::squeeze" or len(node.args) < 2:
        return None
    (value,) = _operands(node)
    dims = node.args[1] if isinstance(node.args[1], list | tuple) else (node.args[1],)
    sizes = [value.shape[dim] for dim in dims if value.dim()]  # type: ignore[index]
    is_dynamic = any(not isinstance(size, int) for size in sizes)
    return "a dynamic dimension is squeezed" if is_dynamic else None


def _dynamic_diagonal(node: torch.fx.Node) -> str | None:
    """It is read by places that have to be known."""
    if _torch.operators.operator_name(node.target) not in ("aten::diagonal", "aten::diagonal_copy"):
        return None
    (value,) = _operands(node)
    sizes = (value.shape[_torch.operators.argument(node, name)] for name in ("dim1", "dim2"))
    return None if all(type(size) is int for size in sizes) else "a diagonal of dynamic size"


def _fractional_range(node: torch.fx.Node) -> str | None:
    is_range = _torch.operators.operator_name(node.target) in ("aten::arange", "aten::linspace")
    if not is_range:
        return None
    if any(isinstance(v, float) and not v.is_integer() for v in node.args):
        return "the number of steps is rounded otherwise"
    value = next(tensors_of(node))
    if _torch.operators.operator_name(node.target) == "aten::linspace":
        return "what is between is rounded otherwise" if _is_integral(value) else None
    far = any(isinstance(v, int | float) and abs(v) > _EXACT for v in node.args)
    return "it is counted in float32" if far and value.dtype is not torch.int64 else None


def _cast_of_cast(node: torch.fx.Node) -> str | None:
    """ONNX Runtime (1.31) casts only once where two casts follow one another, to integers."""
    if node.target is not aten._to_copy.default or not _is_integral(node.meta["val"]):
        return None
    (source,) = node.all_input_nodes
    if source.target is not aten._to_copy.default:
        return None
    (first,) = _operands(source)
    return "two casts would become one" if first.dtype.is_floating_point else None


def _added_at_once(node: torch.fx.Node) -> str | None:
    """Those to rows are scattered instead (:mod:`composer.lowering.operators.selections`)."""
    if _torch.operators.operator_name(node.target) not in (
        "aten::index_put",
        "aten::_unsafe_index_put",
    ):
        return None
    indices = [each.meta["val"] for each in node.args[1] if each is not None]  # type: ignore[union-attr]
    adds = _torch.operators.argument(node, "accumulate") and any(map(_is_integral, indices))
    return "several threads would add to one element at once" if adds else None


def _rounded_quotient(node: torch.fx.Node) -> str | None:
    """ONNX Runtime leaves the rounding out between the division and what follows."""
    if node.target is not aten.div.Tensor_mode or len(node.all_input_nodes) < 2:
        return None
    halves = next(tensors_of(node)).dtype is torch.float16
    truncates = _torch.operators.argument(node, "rounding_mode") == "trunc"
    return (
        "a quotient in float16 is rounded before its fraction goes"
        if halves and truncates
        else None
    )


def _padded_output(node: torch.fx.Node) -> str | None:
    """ONNX Runtime refuses one that no stride leaves over, when it runs."""
    if node.target is not aten.convolution.default or not _torch.operators.argument(
        node, "transposed"
    ):
        return None
    padding, strides = (
        _torch.operators.argument(node, name) for name in ("output_padding", "stride")
    )
    beyond = any(p >= s for p, s in zip(padding, strides, strict=False))
    return "its output is padded by a stride or more" if beyond else None


def _reflected_neighbour(node: torch.fx.Node) -> str | None:
    """ONNX Runtime rounds to a pixel before it reflects at the border, torch after."""
    if _torch.operators.operator_name(node.target) not in (
        "aten::grid_sampler_2d",
        "aten::grid_sampler",
    ):
        return None
    modes = [
        _torch.operators.argument(node, name) for name in ("interpolation_mode", "padding_mode")
    ]
    return "the nearest pixel is found otherwise" if modes == [1, 2] else None


def _integer_division(node: torch.fx.Node) -> str | None:
    """ONNX Runtime divides by the processor's instruction, and a SIGFPE would end the process.

    It traps on a division by zero, and on that of the smallest number by -1. A divisor that the
    dtype does not hold wraps to one that it does.
    """
    if _torch.operators.operator_name(node.target) not in _DIVISIONS or not all(
        _is_integral(v) for v in tensors_of(node)
    ):
        return None
    divisor = node.args[1]
    if isinstance(divisor, torch.fx.Node):
        return "an integer division by zero would end the process"
    held = torch.iinfo(next(tensors_of(node)).dtype)
    wrapped = (int(divisor) - held.min) % 2**held.bits + held.min  # type: ignore[arg-type]
    traps = wrapped in (0, -1)
    return "an integer division by this number may end the process" if traps else None


def _division_of_sizes(node: torch.fx.Node) -> str | None:
    """Torchlib divides with ONNX's ``Div``, which is right for what is not negative."""
    if node.target is not operator.floordiv:
        return None
    numbers = (v.meta["val"] if isinstance(v, torch.fx.Node) else v for v in node.args)
    bounds = map(_torch.symbols.least, numbers)
    negative = any(least is None or least < 0 for least in bounds)
    return "a negative number is rounded towards zero" if negative else None


def _long_integers(node: torch.fx.Node) -> str | None:
    values = next(tensors_of(node), None)  # indices come second
    wrong = (
        values is not None
        and values.dtype is torch.int64
        and _torch.operators.operator_name(node.target) in _LONG
    )
    return "int64 is computed with 32 bits, or saturates" if wrong else None


def _integers(node: torch.fx.Node) -> str | None:
    if not all(map(_is_integral, tensors_of(node))):
        return None
    return _OF_INTEGERS.get(_torch.operators.operator_name(node.target))


def _double_precision(node: torch.fx.Node) -> str | None:
    """Scalars and constants within translations are written as float32, and so are symbols.

    A comparison has operands in float64 only.
    """
    if not any(v.dtype is torch.float64 for v in (*tensors_of(node), *_operands(node))):
        return None
    if any(isinstance(each.meta.get("val"), torch.SymFloat) for each in node.all_input_nodes):
        return "float64 is computed with a symbol of float32"
    scalars = (v for v in (*node.args, *node.kwargs.values()) if isinstance(v, float))
    name = _torch.operators.operator_name(node.target)
    rounded = any(not _is_single(v) for v in scalars) or any(c in name for c in _INEXACT_CONSTANTS)
    return "float64 is computed with float32 constants" if rounded else None


def _half_precision(node: torch.fx.Node) -> str | None:
    """Eager multiplies by the number in float32; ONNX wants it in the dtype of the tensor.

    One below the normal range is there, too, but rounded by up to half of it.
    """
    halves = all(value.dtype is torch.float16 for value in tensors_of(node))
    if not halves or _torch.operators.operator_name(node.target) not in _FACTORS:
        return None
    numbers = (abs(v) for v in node.args if isinstance(v, int | float) and math.isfinite(v) and v)
    lost = any(not _HALF.tiny <= v <= _HALF.max for v in numbers)
    return "float16 does not hold the factor" if lost else None


def _empty_operand(node: torch.fx.Node) -> str | None:
    """Reductions and products of nothing: identity elements and shapes differ."""
    harmless = (
        torch.Tag.pointwise in _tags(node)
        or _torch.operators.operator_name(node.target) in _KEEP_EMPTY
    )
    gone = node.target is aten.cat.default and any(
        map(_torch.symbols.may_be_empty, tensors_of(node))
    )
    if (harmless and not gone) or _torch.operators.is_view(node.target):
        return None
    empty = any(map(_torch.symbols.may_be_empty, _operands(node)))
    return "one of its operands may have no elements" if empty else None


def _strides_of_memory(node: torch.fx.Node) -> str | None:
    """ONNX's nodes see elements in order: the operand has to be all of its memory, row by row.

    Where it was in the first call does not tell where an input is in the others, so positions that
    count from the beginning of an input's memory are torch's.
    """
    if not reads_memory(node):
        return None
    operand = node.all_input_nodes[0]
    value: torch.Tensor = operand.meta["val"]
    offset = _torch.operators.argument(node, "storage_offset")
    memory = value.untyped_storage().nbytes()
    sizes = (
        *value.shape,
        *_torch.operators.argument(node, "size"),
        *_torch.operators.argument(node, "stride"),
    )
    if not all(isinstance(each, int) for each in (*sizes, offset or 0, memory)):
        return "it reads memory by strides, and a size is dynamic"
    whole = memory == value.numel() * value.element_size()
    from_the_beginning = offset is not None and base_of(operand).op == "placeholder"
    if from_the_beginning or not (whole and value.is_contiguous()):
        return "it reads memory by strides that ONNX does not know"
    return None


def _looked_at_by_strides(node: torch.fx.Node) -> str | None:
    """A view that leads to such a call: torch makes it, so that it lies where it does in eager."""
    if not is_view(node):
        return None
    leads = any(_strides_of_memory(user) or _looked_at_by_strides(user) for user in node.users)
    return "its memory is read by strides" if leads else None


def _gaps(node: torch.fx.Node) -> str | None:
    """What an engine gives lies without gaps; what eager does, goes by memory that was there."""
    if is_view(node) or all(map(is_dense, tensors_of(node))):
        return None
    return "its result has gaps in memory" if _is_returned(node) else None


def _is_returned(node: torch.fx.Node) -> bool:
    return any(u.op == "output" or (is_view(u) and _is_returned(u)) for u in node.users)


_RULES: tuple[Callable[[torch.fx.Node], str | None], ...] = (
    _attention_logarithms,
    _divisor_override,
    _windows_in_padding,
    _scatter_mean,
    _numbers_alone,
    _otherwise,
    _dynamic_squeeze,
    _dynamic_diagonal,
    _fractional_range,
    _cast_of_cast,
    _added_at_once,
    _padded_output,
    _rounded_quotient,
    _reflected_neighbour,
    _integer_division,
    _division_of_sizes,
    _long_integers,
    _integers,
    _double_precision,
    _half_precision,
    _empty_operand,
    _strides_of_memory,
    _looked_at_by_strides,
    _gaps,
)


def _tags(node: torch.fx.Node) -> Sequence[torch.Tag]:
    return getattr(node.target, "tags", ())


def _operands(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    for source in node.all_input_nodes:
        yield from tensors_of(source)


def _is_integral(value: torch.Tensor) -> bool:
    return not value.dtype.is_floating_point and value.dtype is not torch.bool


def _is_single(value: float) -> bool:
    try:
        return struct.unpack("f", struct.pack("f", value))[0] == value or value != value
    except OverflowError:
        return False
