"""A tensor's memory as a NumPy array, for engines whose public API takes arrays."""

from __future__ import annotations

from typing import Any

import numpy
import torch


class _Memory:
    """The memory of a contiguous tensor, by NumPy's array interface.

    ``Tensor.numpy()`` is not used: up to torch 2.15 a tensor cannot be resized any more after that
    call (``tests/lowering/test_torch_faults.py``), and FSDP resizes weights.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # the array keeps this object, and so the memory, alive
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tensor.shape,
            "typestr": f"u{tensor.element_size()}",
            "version": 3,
        }


def array_over(tensor: torch.Tensor) -> Any:
    """An array over the memory of a contiguous tensor on the CPU, without a copy.

    Its elements are unsigned integers of the same size, since NumPy lacks some of torch's dtypes.
    The caller tells the engine the real dtype separately.
    """
    if not tensor.numel():  # its address is 0, which NumPy 2.2 refuses
        return numpy.empty(tensor.shape, f"u{tensor.element_size()}")
    return numpy.asarray(_Memory(tensor))
