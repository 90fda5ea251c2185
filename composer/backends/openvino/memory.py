"""Torch tensors as OpenVINO tensors and back, without copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from composer.backends.onnx_engine import Output, array_over, as_scalar, empty
from composer.backends.openvino import library

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
"""Makes an OpenVINO tensor from an argument of the region."""

Place = Callable[[], tuple[Any, Callable[[], torch.Tensor]]]
"""Makes an OpenVINO tensor for an output, and a function.

OpenVINO writes the output to the tensor; the function then returns it as a torch tensor.
"""


def type_of(dtype: torch.dtype) -> Any:
    """Return OpenVINO's type for a dtype."""
    openvino = library.openvino()
    return getattr(openvino.Type, _NAMES[dtype])


def as_tensor(tensor: torch.Tensor) -> Any:
    """Return an OpenVINO tensor over the memory of a contiguous torch tensor.

    The torch tensor must live as long as the OpenVINO tensor.
    """
    openvino = library.openvino()
    return openvino.Tensor(array_over(tensor), list(tensor.shape), type_of(tensor.dtype))


def feed_for(dtype: torch.dtype | None) -> Feed:
    """Return the function that hands over arguments of a dtype.

    It passes the address of the memory, and copies only tensors that are not contiguous. ``None``
    is for an integer; OpenVINO computes with it in 32 bits.

    The function raises ``TypeError`` for another dtype, and ``OverflowError`` for an integer of
    more than 32 bits.
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
    """Return the function that makes the memory of an output.

    It is torch's memory if the shape is known, and OpenVINO's otherwise.

    Args:
        output: What the graph knows of the output.
        said: The shape in the compiled model. It may have sizes that the graph does not know. If
            OpenVINO knows a size, it accepts no tensor of another size.
    """
    openvino = library.openvino()
    dtype = output.dtype or torch.int64
    kind = type_of(dtype)
    if said.is_dynamic:
        return functools.partial(_place_by_openvino, openvino.Tensor, kind, dtype)
    sizes = output.shape if output.shape is not None else tuple(said.to_shape())
    new = empty(sizes, dtype, torch.device("cpu"))
    shape, make = openvino.Shape(list(sizes)), openvino.Tensor

    def place() -> tuple[Any, Callable[[], torch.Tensor]]:
        tensor = new()
        return make(array_over(tensor), shape, kind), lambda: tensor

    return place


def _place_by_openvino(
    make: Any, kind: Any, dtype: torch.dtype
) -> tuple[Any, Callable[[], torch.Tensor]]:
    """Make an empty tensor; OpenVINO allocates memory for it, which nothing else uses."""
    made = make(kind, [0])

    def fetch() -> torch.Tensor:
        array = made.data
        if dtype is torch.bfloat16:  # which numpy does not have
            return torch.from_numpy(array.view("int16")).view(dtype)
        return torch.from_numpy(array)

    return made, fetch
