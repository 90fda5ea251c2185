"""Finds calls that must not be translated to ONNX, since the results would differ from eager's.

Rules for one operator are in its entry (:mod:`composer.lowering.operators`). Rules for all
operators are here. All rules were found by running torch's own operator samples (``op_db``) through
ONNX Runtime and comparing with eager (torch 2.13, onnxscript 0.7, ONNX Runtime 1.31). Each rule has
one reason. When upstream fixes it, ``tests/lowering/test_unsupported.py`` fails and the rule can be
removed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import tensors_of
from composer.lowering.operators import operators
from composer.lowering.operators.entry import Operators, Rule, operands_of
from composer.lowering.views import base_of, is_dense, is_view, reads_memory

aten = torch.ops.aten

_KEEP_EMPTY = ("aten::cat", "aten::clone", "aten::_to_copy", "aten::lift_fresh_copy")
_INEXACT_CONSTANTS = (
    *("hardswish", "hardsigmoid", "sinc", "upsample", "gelu", "softplus", "mish"),
    *("log10", "log2"),
)


def why_unsupported(node: torch.fx.Node, dialect: Operators) -> str | None:
    """Return why the translation of this call would differ from eager; ``None`` if it would not.

    Args:
        node: The call.
        dialect: The engine's entries.
    """
    rules = (*_rules_of(node.target, operators()), *_rules_of(node.target, dialect), *_OF_ALL)
    return next((why for rule in rules if (why := rule(node))), None)


def _rules_of(target: Any, entries: Operators) -> Iterator[Rule]:
    for each in (target, getattr(target, "overloadpacket", None)):
        if each in entries:
            yield from entries[each].unsupported


def _numbers_alone(node: torch.fx.Node) -> str | None:
    """Refuse numbers in place of tensors: ``torch.div(16, 4)`` would be ONNX's integer ``Div``."""
    if (
        not isinstance(node.target, _torch.operators.OpOverload)
        or node.all_input_nodes
        or not node.args
    ):
        return None
    wants = node.target._schema.arguments[0].type
    given = isinstance(node.args[0], int | float) and wants.isSubtypeOf(torch.TensorType.get())
    return "a tensor of numbers alone" if given else None


def _double_precision(node: torch.fx.Node) -> str | None:
    """Refuse float64 calls with scalars, symbols or internal constants that float32 would round.

    Translations write all of these as float32. The dtypes of the operands count as well as that of
    the result: in a comparison, only the operands are float64.
    """
    if not any(v.dtype is torch.float64 for v in (*tensors_of(node), *operands_of(node))):
        return None
    if any(isinstance(each.meta.get("val"), torch.SymFloat) for each in node.all_input_nodes):
        return "float64 is computed with a symbol of float32"
    scalars = (v for v in (*node.args, *node.kwargs.values()) if isinstance(v, float))
    name = _torch.operators.operator_name(node.target)
    rounded = any(not _is_single(v) for v in scalars) or any(c in name for c in _INEXACT_CONSTANTS)
    return "float64 is computed with float32 constants" if rounded else None


def _empty_operand(node: torch.fx.Node) -> str | None:
    """Refuse reductions and products of empty tensors: identity elements and shapes differ."""
    harmless = (
        torch.Tag.pointwise in _tags(node)
        or _torch.operators.operator_name(node.target) in _KEEP_EMPTY
    )
    gone = node.target is aten.cat.default and any(
        map(_torch.symbols.may_be_empty, tensors_of(node))
    )
    if (harmless and not gone) or _torch.operators.is_view(node.target):
        return None
    empty = any(map(_torch.symbols.may_be_empty, operands_of(node)))
    return "one of its operands may have no elements" if empty else None


def _strides_of_memory(node: torch.fx.Node) -> str | None:
    """Refuse calls that read memory by strides, unless the operand is all of its memory, row-major.

    ONNX nodes see the elements in row-major order. An offset that counts from the beginning of an
    input's memory is refused too, since the input may lie elsewhere in its memory at another call.
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
    """Refuse a view that leads to such a call: torch makes it, so that its strides are eager's."""
    if not is_view(node):
        return None
    leads = any(_strides_of_memory(user) or _looked_at_by_strides(user) for user in node.users)
    return "its memory is read by strides" if leads else None


def _gaps(node: torch.fx.Node) -> str | None:
    """Refuse calls whose returned result has gaps in memory: an engine's results have none."""
    if is_view(node) or all(map(is_dense, tensors_of(node))):
        return None
    return "its result has gaps in memory" if _is_returned(node) else None


def _is_returned(node: torch.fx.Node) -> bool:
    return any(u.op == "output" or (is_view(u) and _is_returned(u)) for u in node.users)


_OF_ALL: tuple[Rule, ...] = (
    _numbers_alone,
    _double_precision,
    _empty_operand,
    _strides_of_memory,
    _looked_at_by_strides,
    _gaps,
)


def _tags(node: torch.fx.Node) -> Sequence[torch.Tag]:
    return getattr(node.target, "tags", ())


def _is_single(value: float) -> bool:
    try:
        return struct.unpack("f", struct.pack("f", value))[0] == value or value != value
    except OverflowError:
        return False
