"""Check that there is memory for ONNX Runtime's copies of weights in half precision.

On the CPU, ONNX Runtime computes with such weights in float32. It makes two copies: it keeps the
cast values, and packs them for its matrix products. With ONNX Runtime 1.31 the copies take about
four times the bytes of a bfloat16 weight, and three times those of a float16 weight. The operating
system kills a process that runs out of memory, without an error, so composer checks first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from composer.system.memory import available_memory

_HALVES = frozenset({torch.bfloat16, torch.float16})
_COPIES = 4.5
"""Bytes needed for each byte of such a weight while a session is made."""


def require_memory(weights: Iterable[torch.Tensor]) -> None:
    """Raise a ``MemoryError`` if the copies of these weights need more memory than is free."""
    halves = (each.nbytes for each in weights if each.dtype in _HALVES)
    needed = _COPIES * sum(halves)
    if not needed:
        return
    free = available_memory()
    if free is not None and needed > free:
        message = (
            f"copies of the weights in float32 would take {_gib(needed)}, {_gib(free)} are free"
        )
        raise MemoryError(message)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
