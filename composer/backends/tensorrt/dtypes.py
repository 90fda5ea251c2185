"""TensorRT types and torch dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from composer.errors import refuse
from composer.lowering.export.onnx import why_not
from composer.lowering.partition.regions import seen_by
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
"""Names of TensorRT's types, with the torch dtype of each."""

_COMPUTED = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool}
)
"""The dtypes that composer lets TensorRT compute with.

TensorRT accepts float64, but computes it in float32 without a warning. Its small integers are for
quantized models and images.
"""


def why_not_here(node: torch.fx.Node) -> str | None:
    """Return why TensorRT cannot run a call; ``None`` if it may.

    Either ONNX cannot express the call, or TensorRT does not compute with its dtypes.
    """
    others = {each.dtype for each in seen_by(node)} - _COMPUTED
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in others))
    return why_not(node) or (f"TensorRT does not compute with {names}" if names else None)


def require_dtypes(kind: str, pairs: Iterable[tuple[str, Any, torch.dtype]]) -> None:
    """Refuse if TensorRT's types of tensors differ from their torch dtypes.

    Args:
        kind: ``"input"`` or ``"output"``.
        pairs: For each tensor its name, its type in TensorRT and its dtype in torch.

    Raises:
        Refusal: ``declined`` with ``unsupported_dtype``; it names the first tensor that differs.
    """
    for name, found, expected in pairs:
        if TORCH.get(found.name) is not expected:
            message = f"TensorRT made {found.name} of the {kind} {name}, which is {expected}"
            refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, message)
