"""Dtypes for which ONNX Runtime has no kernel on the CPU: such calls stay torch's, unasked.

What it has no other kernel for it says itself (:mod:`composer.backends.onnxrt.cut`). These are
dtypes of which whole models are made, and what only shows when it runs (onnxruntime 1.31);
``tests/test_onnxrt_memory.py`` says when a kernel appears.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx

from composer import _torch
from composer.lowering.onnx import why_not
from composer.lowering.regions import tensors_of
from composer.lowering.views import is_view

_FLOAT8 = frozenset(
    {
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz),
        *(torch.float8_e5m2, torch.float8_e5m2fnuz),
        torch.float8_e8m0fnu,
    }
)
"""Their casts came with opset 19, the exporter's translations are for 18."""

_MOVES = frozenset(
    {"aten::cat", "aten::clone", "aten::_to_copy", "aten::embedding", "aten::gather"}
    | {"aten::index_select", "aten::flip"}
)
"""What can be done with bfloat16: no arithmetic."""

_RAISES = {
    "aten::scatter_add": frozenset({torch.float16}),
    "aten::scatter_reduce": frozenset({torch.float16, torch.bool}),
    "aten::index_put": frozenset({torch.float16}),
    "aten::_unsafe_index_put": frozenset({torch.float16}),
}
"""Dtypes of which several elements cannot come to one place: there is a kernel, and it raises."""


def why_not_here(node: torch.fx.Node, device: torch.device) -> str | None:
    """Why ONNX Runtime cannot run a call: ONNX cannot say it, or the CPU has no kernel for it."""
    return why_not(node) or (_no_kernel(node) if device.type == "cpu" else None)


def dtypes_of(node: torch.fx.Node) -> set[torch.dtype]:
    """The dtypes of a call's operands and results."""
    return {each.dtype for source in (node, *node.all_input_nodes) for each in tensors_of(source)}


def lacking(dtypes: Iterable[torch.dtype]) -> str:
    """That there is no kernel for these dtypes, in the record's words."""
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"ONNX Runtime has no kernel for {', '.join(names)}"


def _no_kernel(node: torch.fx.Node) -> str | None:
    if node.op != "call_function":
        return None
    dtypes = dtypes_of(node)
    name = _torch.operator_name(node.target)
    missing = dtypes & _FLOAT8
    if name in _RAISES and _torch.argument(node, "accumulate") is not False:
        missing |= dtypes & _RAISES[name]
    if not is_view(node) and name not in _MOVES:
        missing |= dtypes & {torch.bfloat16}
    return lacking(missing) if missing else None
