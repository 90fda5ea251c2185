"""Torch's memory as OpenVINO's tensors and back, without copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from composer import _torch
from composer.backends.arrays import array_over
from composer.backends.openvino import library
from composer.lowering.export.onnx import Output, as_scalar

_NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "boolean",
}

_INT32 = torch.iinfo(torch.int32)

Feed = Callable[[Any], Any]
"""Makes a tensor of OpenVINO's of an argument of the region."""

Place = Callable[[], tuple[Any, Callable[[], Any]]]
"""Makes a tensor for an output to be written to, and what fetches the region's output of it."""


def type_of(dtype: torch.dtype) -> Any:
    """OpenVINO's type of the elements."""
    openvino = library.openvino()
    return getattr(openvino.Type, _NAMES[dtype])


def as_tensor(tensor: torch.Tensor) -> Any:
    """OpenVINO's tensor over the memory of a contiguous one, which has to outlive it."""
    openvino = library.openvino()
    return openvino.Tensor(array_over(tensor), list(tensor.shape), type_of(tensor.dtype))


def feed_for(dtype: torch.dtype | None) -> Feed:
    """How an argument of this dtype is handed over: by address, copied only to close gaps.

    ``None`` is for an integer, which OpenVINO computes with in 32 bits.
    """
    openvino = library.openvino()
    if dtype is None:
        return _feed_integer
    make, kind = openvino.Tensor, type_of(dtype)

    def feed(tensor: torch.Tensor) -> Any:
        if tensor.dtype is not dtype:
            raise TypeError(f"the graph was compiled for {dtype}, and this is {tensor.dtype}")
        return make(array_over(tensor.resolve_neg().contiguous()), tensor.shape, kind)

    return feed


def _feed_integer(number: int) -> Any:
    if not _INT32.min <= number <= _INT32.max:
        raise OverflowError(f"OpenVINO computes integers in 32 bits, and this one is {number}")
    return as_tensor(as_scalar(number))


def place_for(output: Output, said: Any) -> Place:
    """How an output is received: in torch's memory where its shape is known, else OpenVINO's.

    Args:
        output: What the graph knows of it.
        said: The shape that the compiled model says, which may know sizes that the graph does not:
            OpenVINO takes no tensor of another size where it knows it.
    """
    openvino = library.openvino()
    dtype = output.dtype or torch.int64
    kind = type_of(dtype)
    finish = output.receiver()
    if said.is_dynamic:
        return functools.partial(_place_by_openvino, openvino.Tensor, kind, dtype, finish)
    sizes = output.shape if output.shape is not None else tuple(said.to_shape())
    empty = _torch.tensors.empty(sizes, dtype, torch.device("cpu"))
    shape, make = openvino.Shape(list(sizes)), openvino.Tensor

    def place() -> tuple[Any, Callable[[], Any]]:
        tensor = empty()
        return make(array_over(tensor), shape, kind), lambda: finish(tensor)

    return place


def _place_by_openvino(
    make: Any, kind: Any, dtype: torch.dtype, finish: Callable[[torch.Tensor], Any]
) -> tuple[Any, Callable[[], Any]]:
    """A tensor of no elements, new for each call: OpenVINO gives it memory that nobody else has."""
    made = make(kind, [0])

    def fetch() -> Any:
        array = made.data
        if dtype is torch.bfloat16:  # which numpy does not have
            return finish(torch.from_numpy(array.view("int16")).view(dtype))
        return finish(torch.from_numpy(array))

    return made, fetch
