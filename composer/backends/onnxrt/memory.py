"""Torch's memory as ONNX Runtime's values and back, without copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # no __all__

from composer.lowering.onnx import Output

FLOAT8 = {
    torch.float8_e4m3fn: 17,
    torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2: 19,
    torch.float8_e5m2fnuz: 20,
}
"""ONNX's numbers for the types that ONNX Runtime (1.31) does not take by DLPack."""

Feed = Callable[[Any, Any], object]
"""Appends an argument of the region to a vector of ONNX Runtime's values; returns what has to
live until the call is over."""


def input_dtypes(gm: torch.fx.GraphModule) -> tuple[torch.dtype | None, ...]:
    """The dtype of each placeholder; ``None`` for an integer."""
    values = (node.meta["val"] for node in gm.graph.find_nodes(op="placeholder"))
    return tuple(each.dtype if isinstance(each, torch.Tensor) else None for each in values)


def feed_for(dtype: torch.dtype | None) -> Feed:
    """How an argument of this dtype is handed over: by address, copied only to close gaps."""
    if dtype is None:
        return _feed_integer
    if dtype is torch.bool:
        return _feed_bool
    return _feed_float8 if dtype in FLOAT8 else _feed_tensor


def _feed_tensor(vector: Any, tensor: torch.Tensor) -> None:
    vector.push_back(to_dlpack(tensor.contiguous()), False)


def _feed_bool(vector: Any, tensor: torch.Tensor) -> None:
    vector.push_back(to_dlpack(tensor.contiguous().view(torch.uint8)), True)


def _feed_integer(vector: Any, number: int) -> None:
    vector.push_back(to_dlpack(torch.tensor(number)), False)


def _feed_float8(vector: Any, tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.contiguous()
    vector.push_back(as_value(dense))
    return dense


def as_value(tensor: torch.Tensor) -> Any:
    """An ONNX Runtime value over the memory of a contiguous tensor, which must outlive it."""
    from onnxruntime.capi import _pybind_state as native

    if tensor.dtype in FLOAT8:
        array = tensor.view(torch.uint8).numpy()
        return native.OrtValue.ortvalue_from_numpy_with_onnx_type(array, FLOAT8[tensor.dtype])
    is_bool = tensor.dtype is torch.bool
    return native.OrtValue.from_dlpack(
        to_dlpack(tensor.view(torch.uint8) if is_bool else tensor), is_bool
    )


def allocator(output: Output, device: torch.device) -> Callable[[Any], torch.Tensor]:
    """What allocates an output of fixed shape and appends it to the vector that is filled."""
    shape, order = output.shape or (), output.order
    feed = feed_for(output.dtype)

    def allocate(fetches: Any) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=output.dtype, device=device)
        feed(fetches, tensor)
        return tensor

    if order is None:
        return allocate
    return lambda fetches: allocate(fetches).permute(order)


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
