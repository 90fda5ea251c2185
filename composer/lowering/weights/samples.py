"""Elements of each bound weight, by which most writes are seen that raise no version.

``p.data += d``, as peft merges an adapter and averages of weights are swapped in, changes neither
identity nor address nor version. Elements that are compared now and then tell of it, a little late
and not surely: one that was written alone is missed. So a program that writes so should still call
:func:`composer.refresh`, and is told. Not at once: torch raises the version behind a write, which
another thread may be at.

Small buffers are compared whole, at each call: they may be statistics of a batch norm, which torch
moves without raising their version. The 108 of a ResNet-50 take 11 us.
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
"""Of each weight at least, evenly spread."""

PATIENCE = 1.0
"""Seconds after which a write that is counted has been counted."""

_SHARE = 1 / 200
"""Of the time, that comparisons take at most, all engines together."""

_FOUND = (
    "weights were written to through .data, numpy or a collective, which raises no version; a few "
    "of their elements told composer, and its engines read them again. Call composer.refresh() "
    "after such writes: not all are found, nor at once"
)


_SMALL = 2**16
"""Bytes up to which a buffer is compared whole: statistics of 16,384 channels."""


def are_compared_whole(weight: torch.Tensor) -> bool:
    """Whether all elements are compared at each call: a small buffer in the host's memory."""
    return may_be_statistic(weight) and weight.nbytes <= _SMALL and _is_readable(weight)


class Samples:
    """Elements of weights in the host's memory, read where they lie.

    Args:
        weights: Those on other devices, or with gaps, are left out.
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
        """Whether the weights that are compared whole have all elements that they had."""
        return {i: view.tobytes() for i, view in self._whole.items()} == self._all

    def is_whole_changed(self, i: int) -> bool:
        """Whether the weight at this position is one of those, and is not what it was."""
        return i in self._whole and self._whole[i].tobytes() != self._all[i]

    def is_due(self) -> bool:
        """Whether enough time has passed since the last comparison."""
        return time.perf_counter() >= self._due

    def changed(self, others: int) -> frozenset[int]:
        """Positions of the weights of which an element is not what it was.

        Args:
            others: How many more samples share the time that comparisons may take.
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
    """Say, once, that weights were written to and no version told."""
    warn_once(WeightsWarning(_FOUND))


_HAS_NUMPY = importlib.util.find_spec("numpy") is not None
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_readable(weight: torch.Tensor) -> bool:
    return (
        _HAS_NUMPY
        and weight.device.type == "cpu"
        and not (weight.is_conj() or weight.is_neg())  # computed where it is read
        and weight.itemsize in _WORDS
        and _span(weight.shape, weight.stride()) == weight.numel()
    )


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _spread(weight: torch.Tensor, *, whole: bool = False) -> Any:
    """Elements of a dense tensor, or all, as an array of NumPy's, which shares its memory.

    By DLPack: behind ``Tensor.numpy()`` the memory of the weight cannot be resized any more, which
    FSDP does (torch 2.13).
    """
    import numpy

    count = weight.numel()
    row = weight.detach().as_strided((count,), (1,)).view(_WORDS[weight.itemsize])
    return numpy.from_dlpack(row if whole else row[:: max(1, count // _ELEMENTS)])
