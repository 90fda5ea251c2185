"""Calls that ONNX Runtime has no CPU kernel for, because of their dtypes.

They are computed in float32, or left to torch. This module knows the dtypes that whole models use,
and the failures of ONNX Runtime 1.31 that show only when a model runs. All other missing kernels
are found by asking ONNX Runtime.
``tests/backends/onnxrt/test_onnxrt_memory.py`` fails when a kernel appears.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.fx

from composer import _torch
from composer.backends.onnxrt.operators import entries
from composer.lowering.export.onnx import why_not
from composer.lowering.partition.regions import dtype_names, dtypes_of
from composer.lowering.views import is_view

_FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
    | {torch.float8_e8m0fnu}
)
"""Not supported: casts to these dtypes need opset 19, and the exporter writes opset 18."""

_MOVES = frozenset(
    {"aten::cat", "aten::clone", "aten::_to_copy", "aten::embedding", "aten::gather"}
    | {"aten::index_select", "aten::flip", "aten::_unsafe_view"}
)
"""Operators that only move elements. ONNX Runtime runs them in bfloat16, but no arithmetic."""

_WIDENED = frozenset(
    {"aten::scatter_add", "aten::scatter_reduce", "aten::index_put", "aten::_unsafe_index_put"}
    | {"aten::logsumexp"}
)
"""Operators that are not computed in float16.

Some may add several elements into one, for which the kernel raises. For ``logsumexp`` there is no
kernel: ONNX's definition is used, where ``exp`` overflows.
"""


def why_not_here(node: torch.fx.Node, device: torch.device) -> str | None:
    """The reason why ONNX Runtime cannot run a call, or ``None``.

    Either ONNX cannot express the call, or there is no CPU kernel for it.
    """
    why = why_not(node, entries())
    if why is None and device.type == "cpu":
        return _no_kernel(node, device)
    return why


def widens_bfloat16(device: torch.device) -> bool:
    """True if arithmetic in bfloat16 is computed in float32.

    On a processor that multiplies bfloat16, such calls are left to torch instead: torch is faster.
    """
    return device.type == "cpu" and not _torch.processor.multiplies_bf16()


def narrow_here(node: torch.fx.Node, device: torch.device) -> frozenset[torch.dtype]:
    """The dtypes of a call's operands and results that have to be replaced by float32."""
    if node.op != "call_function" or device.type != "cpu":
        return frozenset()
    narrow = frozenset[torch.dtype]()
    if _lacks_float16(node):
        narrow |= dtypes_of(node) & {torch.float16}
    if widens_bfloat16(device):
        narrow |= _computed(node) & {torch.bfloat16}
    return narrow


def lacking(dtypes: Iterable[torch.dtype]) -> str:
    """Text for the record: ONNX Runtime has no kernel for these dtypes."""
    return f"ONNX Runtime has no kernel for {dtype_names(dtypes)}"


def _no_kernel(node: torch.fx.Node, device: torch.device) -> str | None:
    missing = dtypes_of(node) & _FLOAT8
    if _torch.operators.operator_name(node.target) == "aten::scatter_reduce":  # the kernel raises
        missing |= dtypes_of(node) & {torch.bool}
    if not widens_bfloat16(device):
        missing |= _computed(node) & {torch.bfloat16}
    return lacking(missing) if missing else None


def _computed(node: torch.fx.Node) -> frozenset[torch.dtype]:
    """The dtypes that a call computes with; empty if the call only moves elements."""
    is_move = _torch.operators.operator_name(node.target) in _MOVES
    if is_move or node.target is operator.getitem or is_view(node):
        return frozenset()
    return dtypes_of(node)


def _lacks_float16(node: torch.fx.Node) -> bool:
    if _torch.operators.operator_name(node.target) not in _WIDENED:
        return False
    return _torch.operators.argument(node, "accumulate") is not False  # False: nothing is added up
