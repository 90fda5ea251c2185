"""Memory for outputs whose sizes depend on the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def make_allocator(trt: Any, device: torch.device) -> Any:
    """Return an allocator for an output whose size depends on the data."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]  # only known at run time
        """Gives TensorRT torch's memory of the size it asks for, and keeps the shape."""

        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self._memory = torch.empty(0, dtype=torch.uint8, device=device)
            self._shape: tuple[int, ...] = ()

        def reallocate_output_async(
            self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
        ) -> int:
            """Return the address of at least ``size`` bytes."""
            if self._memory.nbytes < max(size, 1):
                self._memory = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            return self._memory.data_ptr()

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            """Keep the shape of the output."""
            self._shape = tuple(shape)

        def tensor(self, dtype: torch.dtype) -> torch.Tensor:
            """Return the output."""
            count = math.prod(self._shape) * dtype.itemsize
            return self._memory[:count].view(dtype).view(self._shape)

    return Allocator()
