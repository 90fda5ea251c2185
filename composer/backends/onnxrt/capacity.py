"""Whether there is memory for the copies that ONNX Runtime makes of weights in half precision.

On the CPU it computes with them in float32. Twice over: it keeps the values that it cast, and packs
them for its products, so that a weight of bfloat16 takes about four times its bytes beside torch's
own (1.31; of float16 three times). A process that runs out of memory is killed, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from composer.system.memory import available_memory

_HALVES = frozenset({torch.bfloat16, torch.float16})
_COPIES = 4.5
"""Bytes for each byte of such a weight while a session is made."""


def require_memory(weights: Iterable[torch.Tensor]) -> None:
    """Raise a ``MemoryError`` where the copies of these weights would not fit into what is free."""
    needed = _COPIES * sum(each.nbytes for each in weights if each.dtype in _HALVES)
    free = available_memory() if needed else None
    if free is not None and needed > free:
        what = f"copies of the weights in float32 would take {_gib(needed)}, {_gib(free)} are free"
        raise MemoryError(what)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
