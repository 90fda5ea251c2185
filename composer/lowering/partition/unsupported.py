"""Finds calls that must not be translated to ONNX, since the results would differ from eager's.

Rules for one operator are in its entry (:mod:`composer.lowering.operators`). Rules for all
operators are here. All rules were found by running torch's own operator samples (``op_db``) through
ONNX Runtime and comparing with eager (torch 2.13, onnxscript 0.7, ONNX Runtime 1.31). Each rule has
one reason. When upstream fixes it, ``tests/lowering/test_unsupported.py`` fails and the rule can be
removed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import are_static, is_pointwise, tensors_of, value_of
from composer.lowering.operators import operators
from composer.lowering.operators.entry import Operators, Rule, operands_of
from composer.lowering.partition.regions import seen_by
from composer.lowering.views import base_of, is_dense, is_returned, is_view, reads_memory

aten = torch.ops.aten

_KEEP_EMPTY = ("aten::cat", "aten::clone", "aten::_to_copy", "aten::lift_fresh_copy")
_INEXACT_CONSTANTS = (
    *("hardswish", "hardsigmoid", "sinc", "upsample", "gelu", "softplus", "mish"),
    *("log10", "log2"),
)


def why_unsupported(node: torch.fx.Node, entries: Operators) -> str | None:
    """Return why the translation of this call would differ from eager; ``None`` if it would not.

    ``entries`` has the engine's entries.
    """
    rules = (*_rules_of(node.target, operators()), *_rules_of(node.target, entries), *_OF_ALL)
    for rule in rules:
        why = rule(node)
        if why is not None:
            return why
    return None


def _rules_of(target: Any, entries: Operators) -> Iterator[Rule]:
    for each in (target, getattr(target, "overloadpacket", None)):
        if each in entries:
            yield from entries[each].unsupported


def _numbers_alone(node: torch.fx.Node) -> str | None:
    """Refuse numbers in place of tensors: ``torch.div(16, 4)`` would be ONNX's integer ``Div``."""
    if not isinstance(node.target, _torch.operators.OpOverload) or node.all_input_nodes:
        return None
    if not node.args or not isinstance(node.args[0], int | float):
        return None
    takes_tensor = node.target._schema.arguments[0].type.isSubtypeOf(torch.TensorType.get())
    return "a tensor of numbers alone" if takes_tensor else None


def _double_precision(node: torch.fx.Node) -> str | None:
    """Refuse float64 calls with scalars, symbols or internal constants that float32 would round.

    Translations write all of these as float32. The dtypes of the operands count as well as that of
    the result: in a comparison, only the operands are float64.
    """
    if torch.float64 not in {tensor.dtype for tensor in seen_by(node)}:
        return None
    if any(isinstance(value_of(each), torch.SymFloat) for each in node.all_input_nodes):
        return "float64 is computed with a symbol of float32"
    name = _torch.operators.operator_name(node.target)
    has_constants = any(part in name for part in _INEXACT_CONSTANTS)
    if has_constants or not all(map(_is_single, (*node.args, *node.kwargs.values()))):
        return "float64 is computed with float32 constants"
    return None


def _empty_operand(node: torch.fx.Node) -> str | None:
    """Refuse reductions and products of empty tensors: identity elements and shapes differ."""
    if _keeps_empty(node) or _torch.operators.is_view(node.target):
        return None
    is_empty = any(map(_torch.symbols.may_be_empty, operands_of(node)))
    return "one of its operands may have no elements" if is_empty else None


def _keeps_empty(node: torch.fx.Node) -> bool:
    """True if the result has elements wherever an operand has, and each comes from an element."""
    if node.target is aten.cat.default and any(map(_torch.symbols.may_be_empty, tensors_of(node))):
        return False
    return is_pointwise(node) or _torch.operators.operator_name(node.target) in _KEEP_EMPTY


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
    size = _torch.operators.argument(node, "size")
    stride = _torch.operators.argument(node, "stride")
    memory = value.untyped_storage().nbytes()
    if not are_static((*value.shape, *size, *stride, offset or 0, memory)):
        return "it reads memory by strides, and a size is dynamic"
    is_whole = memory == value.numel() * value.element_size() and value.is_contiguous()
    from_the_beginning = offset is not None and base_of(operand).op == "placeholder"
    if from_the_beginning or not is_whole:
        return "it reads memory by strides that ONNX does not know"
    return None


def _read_by_strides(node: torch.fx.Node) -> str | None:
    """Refuse a view that leads to such a call: torch makes it, so that its strides are eager's."""
    if not is_view(node):
        return None
    leads = any(_strides_of_memory(user) or _read_by_strides(user) for user in node.users)
    return "its memory is read by strides" if leads else None


def _gaps(node: torch.fx.Node) -> str | None:
    """Refuse calls whose returned result has gaps in memory: an engine's results have none."""
    if is_view(node) or all(map(is_dense, tensors_of(node))) or not is_returned(node):
        return None
    return "its result has gaps in memory"


_OF_ALL: tuple[Rule, ...] = (
    _numbers_alone,
    _double_precision,
    _empty_operand,
    _strides_of_memory,
    _read_by_strides,
    _gaps,
)


def _is_single(value: object) -> bool:
    """True if float32 holds the value exactly; also for what is no float."""
    if not isinstance(value, float) or math.isnan(value):
        return True
    try:
        return bool(struct.unpack("f", struct.pack("f", value))[0] == value)
    except OverflowError:
        return False
