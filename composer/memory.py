"""Memory that has run out: telling it apart from other errors, and making room."""

from __future__ import annotations

import gc

import torch


def lacks_memory(error: BaseException) -> bool:
    """Whether an engine had too little memory, which it may have at its next call."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def free_memory() -> None:
    """Collect garbage, and give back what torch's allocator keeps for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
