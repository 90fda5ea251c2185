"""TensorRT's types and torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from composer.errors import refuse
from composer.graphs.nodes import tensors_of
from composer.lowering.export.onnx import why_not
from composer.records import Reason, Status

TORCH = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "FP8": torch.float8_e4m3fn,
}
"""Name of a type of TensorRT's to torch's."""

_COMPUTED = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool}
)
"""What TensorRT computes with. It would take float64, and compute float32 in silence; the small
integers are for quantized models and images."""


def why_not_here(node: torch.fx.Node) -> str | None:
    """Why TensorRT cannot run a call: ONNX cannot say it, or it does not compute with the type."""
    return why_not(node) or _other_dtype(node)


def _other_dtype(node: torch.fx.Node) -> str | None:
    if node.op != "call_function":
        return None
    sources = (node, *node.all_input_nodes)
    others = {t.dtype for source in sources for t in tensors_of(source)} - _COMPUTED
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in others))
    return f"TensorRT does not compute with {names}" if names else None


def require_dtypes(what: str, pairs: Iterable[tuple[str, Any, torch.dtype]]) -> None:
    """Compare what TensorRT made of types with what they are in torch.

    Args:
        what: ``"input"`` or ``"output"``.
        pairs: Name of a tensor, its type in TensorRT, its dtype in torch.

    Raises:
        Refusal: ``declined`` with ``unsupported_dtype``, naming the first that differs.
    """
    for name, found, expected in pairs:
        if TORCH.get(found.name) is not expected:
            message = f"TensorRT made {found.name} of the {what} {name}, which is {expected}"
            refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, message)
