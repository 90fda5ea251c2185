"""Compares some elements of each bound weight, to find writes that raise no version.

``p.data += d`` changes neither identity nor address nor version. peft merges an adapter so, and
programs swap in averaged weights so. Composer compares a few elements of each weight now and then,
and finds most of these writes a little late. It misses a write to few elements. So a program that
writes this way should still call :func:`composer.refresh`, and a warning says so. The warning does
not come at once, since torch raises the version after a write, and another thread may be writing.

Small buffers are compared whole at each call. They may be statistics of a batch norm, which torch
changes without raising their version. The 108 such buffers of a ResNet-50 take 11 us.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import Any

import torch

from composer.lowering.weights.statistics import may_be_statistic

_ELEMENTS = 8
"""Elements that are compared of each weight, at least; they are evenly spread."""

PATIENCE = 1.0
"""Seconds after which a write that raises the version must have raised it."""

_SHARE = 1 / 200
"""The part of the time that the comparisons of all engines take at most."""

_SMALL = 2**16
"""Size in bytes up to which a buffer is compared whole: statistics of 16,384 channels."""


def are_compared_whole(weight: torch.Tensor) -> bool:
    """True if all elements are compared at each call: a small buffer in the host's memory."""
    return may_be_statistic(weight) and weight.nbytes <= _SMALL and _is_readable(weight)


class Samples:
    """Elements of weights in the host's memory, read without a copy of the weight.

    Args:
        weights: The weights by index. Those on other devices, or with gaps, are left out.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor]) -> None:
        self._spread: dict[int, Any] = {}
        self._whole: dict[int, Any] = {}
        for i, weight in weights.items():
            if are_compared_whole(weight):
                self._whole[i] = _elements(weight)
            elif _is_readable(weight):
                step = max(1, weight.numel() // _ELEMENTS)
                self._spread[i] = _elements(weight, step)
        self._spread_bytes = _read(self._spread)
        self._whole_bytes = _read(self._whole)
        self._due = time.perf_counter()

    def are_whole_unchanged(self) -> bool:
        """True if no weight that is compared whole has changed."""
        return _read(self._whole) == self._whole_bytes

    def is_whole_changed(self, i: int) -> bool:
        """True if the weight at this index is compared whole and has changed."""
        return i in self._whole and self._whole[i].tobytes() != self._whole_bytes[i]

    def is_due(self) -> bool:
        """True if enough time has passed since the last comparison."""
        return bool(self._spread) and time.perf_counter() >= self._due

    def changed(self, others: int) -> frozenset[int]:
        """Return the indices of the weights, not compared whole, with a changed element.

        Args:
            others: Number of other ``Samples`` that share the time for comparisons.
        """
        started = time.perf_counter()
        present = _read(self._spread)
        ended = time.perf_counter()
        self._due = ended + (ended - started) * (others + 1) / _SHARE
        return frozenset(i for i, old in self._spread_bytes.items() if present[i] != old)


def _read(arrays: Mapping[int, Any]) -> dict[int, bytes]:
    return {i: array.tobytes() for i, array in arrays.items()}


_HAS_NUMPY = importlib.util.find_spec("numpy") is not None
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_readable(weight: torch.Tensor) -> bool:
    """True if the weight lies in the host's memory without gaps, in words that NumPy has."""
    if not _HAS_NUMPY or weight.device.type != "cpu":
        return False
    if weight.is_conj() or weight.is_neg():  # computed by torch at each read
        return False
    sizes = zip(weight.shape, weight.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes)
    return weight.itemsize in _WORDS and span == weight.numel()


def _elements(weight: torch.Tensor, step: int = 1) -> Any:
    """Return every ``step``-th element of a dense tensor as a NumPy array that shares its memory.

    The array is made by DLPack. After ``Tensor.numpy()`` FSDP could not resize the memory of the
    weight any more (up to torch 2.15, see ``tests/lowering/test_torch_faults.py``).
    """
    import numpy

    row = weight.detach().as_strided((weight.numel(),), (1,)).view(_WORDS[weight.itemsize])
    return numpy.from_dlpack(row[::step])
