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
from collections.abc import Sequence
from typing import Any

import torch

from composer.errors import WeightsWarning
from composer.lowering.weights.statistics import may_be_statistic
from composer.system.warned import warn_once

_ELEMENTS = 8
"""Elements that are compared of each weight, at least; they are evenly spread."""

PATIENCE = 1.0
"""Seconds after which a write that raises the version must have raised it."""

_SHARE = 1 / 200
"""The part of the time that the comparisons of all engines take at most."""

_FOUND = (
    "weights were written to through .data, numpy or a collective, which raises no version; a few "
    "of their elements told composer, and its engines read them again. Call composer.refresh() "
    "after such writes: not all are found, nor at once"
)


_SMALL = 2**16
"""Size in bytes up to which a buffer is compared whole: statistics of 16,384 channels."""


def are_compared_whole(weight: torch.Tensor) -> bool:
    """True if all elements are compared at each call: a small buffer in the host's memory."""
    return may_be_statistic(weight) and weight.nbytes <= _SMALL and _is_readable(weight)


class Samples:
    """Elements of weights in the host's memory, read without a copy of the weight.

    Args:
        weights: The weights. Those on other devices, or with gaps, are left out.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        fit = [i for i, each in enumerate(weights) if _is_readable(each)]
        whole = [i for i in fit if are_compared_whole(weights[i])]
        self._indices = tuple(i for i in fit if i not in whole)
        self._views = [_spread(weights[i]) for i in self._indices]
        self._kept = self._read()
        self._whole = {i: _spread(weights[i], whole=True) for i in whole}
        self._all = {i: view.tobytes() for i, view in self._whole.items()}
        self._due = time.perf_counter()

    def are_whole_unchanged(self) -> bool:
        """True if no weight that is compared whole has changed."""
        return {i: view.tobytes() for i, view in self._whole.items()} == self._all

    def is_whole_changed(self, i: int) -> bool:
        """True if the weight at this position is compared whole and has changed."""
        return i in self._whole and self._whole[i].tobytes() != self._all[i]

    def is_due(self) -> bool:
        """True if enough time has passed since the last comparison."""
        return time.perf_counter() >= self._due

    def changed(self, others: int) -> frozenset[int]:
        """Return the positions of the weights with a changed element.

        Args:
            others: Number of other ``Samples`` that share the time for comparisons.
        """
        started = time.perf_counter()
        found = self._read()
        ended = time.perf_counter()
        self._due = ended + (ended - started) * (others + 1) / _SHARE
        triples = zip(self._indices, found, self._kept, strict=True)
        return frozenset(i for i, now, then in triples if now != then)

    def _read(self) -> list[bytes]:
        return [each.tobytes() for each in self._views]


def warn() -> None:
    """Warn once that weights were written to without a new version."""
    warn_once(WeightsWarning(_FOUND))


_HAS_NUMPY = importlib.util.find_spec("numpy") is not None
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_readable(weight: torch.Tensor) -> bool:
    return (
        _HAS_NUMPY
        and weight.device.type == "cpu"
        and not (weight.is_conj() or weight.is_neg())  # computed by torch at each read
        and weight.itemsize in _WORDS
        and _span(weight.shape, weight.stride()) == weight.numel()
    )


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements between the first and the last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _spread(weight: torch.Tensor, *, whole: bool = False) -> Any:
    """Return some or all elements of a dense tensor as a NumPy array that shares its memory.

    The array is made by DLPack. After ``Tensor.numpy()`` the memory of the weight could not be
    resized any more (torch 2.13), and FSDP resizes it.
    """
    import numpy

    count = weight.numel()
    row = weight.detach().as_strided((count,), (1,)).view(_WORDS[weight.itemsize])
    return numpy.from_dlpack(row if whole else row[:: max(1, count // _ELEMENTS)])
