"""Dtypes for which ONNX Runtime has no kernel on the CPU: such calls stay torch's.

The session would refuse the whole model for one of them. Read from its own list of kernels
(``get_all_opkernel_def``, onnxruntime 1.31); ``tests/test_onnxrt.py`` says when one appears.
"""

from __future__ import annotations

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

_MISSING = {
    torch.float64: frozenset(
        {"aten::convolution", "aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d"}
        | {"aten::erf", "aten::special_erf", "aten::tan"}
    ),
    torch.float16: frozenset({"aten::scatter_add"}),
}


def why_not_here(node: torch.fx.Node, device: torch.device) -> str | None:
    """Why ONNX Runtime cannot run a call: ONNX cannot say it, or the CPU has no kernel for it."""
    return why_not(node) or (_no_kernel(node) if device.type == "cpu" else None)


def _no_kernel(node: torch.fx.Node) -> str | None:
    if node.op != "call_function":
        return None
    dtypes = {each.dtype for source in (node, *node.all_input_nodes) for each in tensors_of(source)}
    name = _torch.operator_name(node.target)
    moves = is_view(node) or name in _MOVES
    if dtypes & _FLOAT8:
        missing = "float8"
    elif torch.bfloat16 in dtypes and not moves:
        missing = "bfloat16"
    else:
        lacking = (dtype for dtype in dtypes if name in _MISSING.get(dtype, ()))
        missing = ", ".join(str(dtype).removeprefix("torch.") for dtype in lacking)
    return f"ONNX Runtime has no kernel for {missing}" if missing else None
