"""Compares a few elements of bound weights at each call, to find writes that raise no version.

``p.data += d`` changes neither identity nor address nor version. An average of weights (EMA) is
kept so, peft merges an adapter so, and programs swap in averaged weights so. Such a write is dense,
and mostly to many weights at once. So each call compares one element of each of four weights, which
takes 0.3 us, and the next call compares those of four others. A write to every weight is found at
the call that follows it, a write to one of 200 within 50 calls. Composer misses a write to few
elements. So a program that writes this way should still call :func:`composer.refresh`, and a
warning says so.

Small buffers are compared whole at each call. They may be statistics of a batch norm, which torch
changes without raising their version. The 108 such buffers of a ResNet-50 take 11 us.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from composer.lowering.weights.statistics import may_be_statistic

_AT_ONCE = 4
"""Number of elements that are compared at each call, each of another weight."""

_ELEMENTS = 8
"""Elements of a weight that take turns; they are evenly spread."""

_SMALL = 2**16
"""Size in bytes up to which a buffer is compared whole: statistics of 16,384 channels."""


def are_compared_whole(weight: torch.Tensor) -> bool:
    """True if all elements are compared at each call: a small buffer in the host's memory."""
    return may_be_statistic(weight) and weight.nbytes <= _SMALL and _is_readable(weight)


class _Element(NamedTuple):
    """An element of a weight, and the word that it was when the weight was bound."""

    words: memoryview
    position: int
    word: int


class Samples:
    """Elements of weights in the host's memory, read without a copy of the weight.

    Args:
        weights: The weights by index. Those on other devices, or with gaps, are left out.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor]) -> None:
        self._whole: dict[int, Any] = {}
        self._elements: dict[int, list[_Element]] = {}
        # An optimizer or an average leaves many norms and biases as they are, but no matrix. With
        # the largest first, each turn has weights of all sizes.
        for i, weight in sorted(weights.items(), key=lambda item: -item[1].numel()):
            if are_compared_whole(weight):
                self._whole[i] = _words(weight)
            elif weight.numel() and _is_readable(weight):
                self._elements[i] = _spread(memoryview(_words(weight)))
        self._whole_bytes = _read(self._whole)
        self._next = itertools.cycle(_turns(list(self._elements.values()))).__next__

    def are_whole_unchanged(self) -> bool:
        """True if no weight that is compared whole has changed."""
        return _read(self._whole) == self._whole_bytes

    def is_whole_changed(self, i: int) -> bool:
        """True if the weight at this index is compared whole and has changed."""
        return i in self._whole and self._whole[i].tobytes() != self._whole_bytes[i]

    def show_a_write(self) -> bool:
        """True if one of the elements whose turn it is has changed."""
        for words, position, word in self._next():  # noqa: SIM110  # a generator would cost more
            if words[position] != word:
                return True
        return False

    def changed(self) -> frozenset[int]:
        """Return the indices of the weights, not compared whole, with a changed element."""
        return frozenset(i for i, elements in self._elements.items() if _differ(elements))


def _spread(words: memoryview) -> list[_Element]:
    """Return elements from all over a weight.

    Zeros are left out where there is something else: a weight that is scaled keeps them.
    """
    size = len(words)
    positions = sorted({size * part // _ELEMENTS for part in range(_ELEMENTS)})
    elements = [_Element(words, each, words[each]) for each in positions]
    return [each for each in elements if each.word] or elements


def _turns(weights: list[list[_Element]]) -> list[tuple[_Element, ...]]:
    """Return which elements are compared at each call, until each has had its turn."""
    number = len(weights)
    turns = []
    for lap in range(_ELEMENTS):
        for first in range(number):
            places = [(first + number * part // _AT_ONCE) % number for part in range(_AT_ONCE)]
            chosen = [weights[place] for place in places]
            turns.append(tuple(each[(lap + i) % len(each)] for i, each in enumerate(chosen)))
    return turns or [()]


def _differ(elements: list[_Element]) -> bool:
    return any(words[position] != word for words, position, word in elements)


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


def _words(weight: torch.Tensor) -> Any:
    """Return the elements of a dense tensor as a NumPy array of integers that shares its memory.

    The array is made by DLPack. After ``Tensor.numpy()`` FSDP could not resize the memory of the
    weight any more (up to torch 2.15, see ``tests/lowering/test_torch_faults.py``).
    """
    import numpy

    row = weight.detach().as_strided((weight.numel(),), (1,)).view(_WORDS[weight.itemsize])
    return numpy.from_dlpack(row)
