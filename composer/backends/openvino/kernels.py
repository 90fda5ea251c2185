"""What OpenVINO computes otherwise than torch without saying so: such calls stay torch's.

Its plugin for the CPU (2026.4) computes int64 in 32 bits (openvinotoolkit/openvino#37766, #37957,
#35890), most of int32 and all of float64 in single precision (#37968), whatever the model says, and
lets small integers stop at the largest one where torch's go round. No property tells of it;
``test_openvino.py`` says when that changes.
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
"""Operators whose int64 results are positions in a tensor, which 32 bits hold.

Those of pools are not among them: in a window of nothing but minus infinity it is the wrong one.
"""

_UNCHECKED = frozenset({"aten::_unsafe_index"})
"""Operators that read int64 operands as positions, and promise that there are such.

Interpolation is made of them. Elsewhere eager raises for a position that is not there, and OpenVINO
does not.
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
"""Operators that OpenVINO computes otherwise on ordinary values, infinity being one in masks."""

_CLAMPS = frozenset({"aten::clamp", "aten::clamp_min", "aten::clamp_max"})

_AVERAGES = frozenset({"aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d"})

_TRUTHS = frozenset({"aten::_to_copy", "aten::logical_not", "aten::logical_and"})
_TRUTHS |= {"aten::logical_or", "aten::logical_xor", "aten::all", "aten::any"}


def why_not_here(
    node: torch.fx.Node, weights: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> str | None:
    """Why a call is left to torch without asking OpenVINO's reader; ``None`` if it is not.

    Args:
        node: The call.
        weights: Those that the engine takes in, by the names of their inputs.
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
    """Whether it is a number in float64 beside tensors in float32: torch reads it in float32, too.

    Dynamo captures one that the program draws by Python's ``random`` so (torch 2.15).
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
    """OpenVINO (2026.4) refuses one larger than what it goes over, or ends the process."""
    if name not in _POOLS | _AVERAGES or not _torch.operators.argument(node, "ceil_mode"):
        return None
    (given,) = tensors_of(node.all_input_nodes[0])
    dims = len(_torch.operators.argument(node, "kernel_size"))
    is_dynamic = not all(isinstance(size, int) for size in given.shape[-dims:])
    return "a window may be larger than a dynamic size" if is_dynamic else None


def _padded_maxima(node: torch.fx.Node, name: str) -> str | None:
    """Positions come out empty, values end the process at once or a little later (2026.4)."""
    if name not in _POOLS or not _torch.operators.argument(node, "ceil_mode"):
        return None
    sizes = (size for each in tensors_of(node.all_input_nodes[0]) for size in each.shape)
    is_dynamic = not all(isinstance(size, int) for size in sizes)
    ends = is_dynamic and any(_torch.operators.argument(node, "padding"))
    return "padded windows of dynamic sizes may end the process" if ends else None


def _padded_points(node: torch.fx.Node, name: str) -> str | None:
    """A kernel of one place that skips some: what comes before computes only those it reads.

    OpenVINO (2026.4) forgets the padding when it has it so, and counts from the first that is none.
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
    """No model with one can be compiled, whoever else is in it."""
    if name != "aten::convolution" or all(isinstance(size, int) for size in _kernel(node)):
        return None
    return "OpenVINO has no kernels of dynamic sizes"


def _kernel(node: torch.fx.Node) -> torch.Size:
    """The sizes of a convolution's weight."""
    (weight,) = tensors_of(_torch.operators.argument(node, "weight"))
    return weight.shape


def _arithmetic_on_sizes(node: torch.fx.Node) -> str | None:
    """Python's integers know no limit; what comes of them is an input of the model, and checked."""
    of_size = node.target is torch.ops.aten.sym_size.int
    is_number = isinstance(node.meta.get("val"), torch.SymInt) and not of_size
    return "OpenVINO computes sizes in 32 bits" if is_number else None


def _nothing(node: torch.fx.Node) -> str | None:
    """An integer division by zero, which ends the process, where a part is taken of nothing."""
    empty = any(map(_torch.symbols.may_be_empty, _results(node)))
    return "OpenVINO divides by the number of elements, which may be zero" if empty else None


def _open_bound(node: torch.fx.Node) -> str | None:
    """A ``Clip`` with one bound: the reader makes the other, of the dtype of what is clipped.

    Behind a node that it does not convert there is none, and it crashes. A bound for each element
    becomes a maximum or minimum.
    """
    if _torch.operators.operator_name(node.target) not in _CLAMPS:
        return None
    is_open = node.target is not torch.ops.aten.clamp.default or any(
        _torch.operators.argument(node, bound) is None for bound in ("min", "max")
    )
    return "OpenVINO's reader may crash on a single bound" if is_open else None


def _values(node: torch.fx.Node, weights: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The operands, and those results that are read, but for what are positions."""
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
    """Whether a value is an input, or left to torch."""
    return node.op == "placeholder" or why_not_here(node, weights) is not None


def _copies_positions(node: torch.fx.Node) -> bool:
    """Whether the call copies positions that the graph holds for an operator that trusts them.

    They are what an interpolation over fixed sizes was folded to.
    """
    source = node.args[0] if node.target is torch.ops.aten.clone.default else None
    if not isinstance(source, torch.fx.Node) or source.op != "get_attr":
        return False
    readers = {_torch.operators.operator_name(user.target) for user in node.users}
    return source.meta["val"].dtype is torch.int64 and bool(readers) and readers <= _UNCHECKED


def _results(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    if not isinstance(node.meta.get("val"), tuple | list):
        yield from tensors_of(node)
        return
    for user in node.users:
        if user.target is operator.getitem and user.users:
            yield from tensors_of(user)
