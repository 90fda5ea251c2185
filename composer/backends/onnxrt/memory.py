"""Torch's memory as ONNX Runtime's values and back, without copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # no __all__

from composer import _torch
from composer.backends.onnxrt.library import native
from composer.lowering.onnx import Output, as_scalar

Feed = Callable[[Any, Any], None]
"""Appends an argument of the region to a vector of ONNX Runtime's values."""


def feed_for(dtype: torch.dtype | None) -> Feed:
    """How an argument of this dtype is handed over: by address, copied only to close gaps."""
    if dtype is None:
        return _feed_integer
    return _feed_bool if dtype is torch.bool else _feed_tensor


def _feed_tensor(vector: Any, tensor: torch.Tensor) -> None:
    vector.push_back(to_dlpack(tensor.contiguous()), False)


def _feed_bool(vector: Any, tensor: torch.Tensor) -> None:
    vector.push_back(to_dlpack(tensor.contiguous().view(torch.uint8)), True)


def _feed_integer(vector: Any, number: int) -> None:
    vector.push_back(to_dlpack(as_scalar(number)), False)


def as_value(tensor: torch.Tensor) -> Any:
    """An ONNX Runtime value over the memory of a contiguous tensor."""
    is_bool = tensor.dtype is torch.bool
    return native().OrtValue.from_dlpack(
        to_dlpack(tensor.view(torch.uint8) if is_bool else tensor), is_bool
    )


def allocator(output: Output, device: torch.device) -> Callable[[Any], torch.Tensor]:
    """What allocates an output of fixed shape and appends it to the vector that is filled."""
    assert output.shape is not None
    assert output.dtype is not None
    empty, order = _torch.empty(output.shape, output.dtype, device), output.order

    def allocate(fetches: Any) -> torch.Tensor:
        tensor = empty()
        fetches.push_back(to_dlpack(tensor), False)
        return tensor

    def allocate_bool(fetches: Any) -> torch.Tensor:
        tensor = empty()
        fetches.push_back(to_dlpack(tensor.view(torch.uint8)), True)
        return tensor

    chosen = allocate_bool if output.dtype is torch.bool else allocate
    return chosen if order is None else lambda fetches: chosen(fetches).permute(order)


def lend(tensor: torch.Tensor, fetches: Any) -> torch.Tensor:
    """Have an output written to the memory of a contiguous tensor, which is then the result."""
    fetches.push_back(to_dlpack(tensor), False)
    return tensor


def receiver(output: Output) -> Callable[[Any], Any]:
    """What makes the region's output of the DLPack capsule of a value that ONNX Runtime made."""
    order = output.order
    if output.dtype is None:
        return lambda capsule: from_dlpack(capsule).item()
    if output.dtype is not torch.bool:
        return from_dlpack if order is None else lambda capsule: from_dlpack(capsule).permute(order)
    if order is None:
        return lambda capsule: from_dlpack(capsule).view(torch.bool)
    return lambda capsule: from_dlpack(capsule).view(torch.bool).permute(order)
