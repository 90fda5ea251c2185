"""Finds the weights that an engine may take in: those whose changes composer can see.

Composer sees a change of a weight by its ``data_ptr`` and ``_version``
(:mod:`~composer.lowering.weights.by_address`). This fails for a weight that is part of a larger
tensor. Each of the two has a version of its own, unless one was made as a view of the other::

    vector = parameters_to_vector(model.parameters())        version 0
    |   weight, version 0    | bias, version 0 |             vector_to_parameters(vector, ...)
    vector.mul_(2)        changes the weight; its version stays 0

The program can write to the larger tensor only if it still holds it. Weights are often parts of a
tensor that no longer exists: transformers splits the tensors that it loads, and torch's windows are
parts of a computed tensor. If all parts were left out, such models would have no frozen
weights. torch does not list the tensors of a storage. So Python's list of objects is searched, once
for each graph, and only if a weight is a part of a larger memory. Invariants:

- A weight is left out if a larger plain tensor that Python knows lies over all of it.
- All parts are left out if the list does not have the weights themselves, as after ``gc.freeze()``.
- A larger tensor that only native code holds is not found.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from composer import _torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def watchable(values: Mapping[int, Any]) -> dict[int, torch.Tensor]:
    """Return the tensors whose changes can be seen, and whose memory an engine can share.

    These tensors are left out:

    - inference tensors, which have no version;
    - subclasses and sparse tensors, which have no single address;
    - tensors in CPU memory that other processes may write to (for a GPU torch cannot tell);
    - parts of a larger tensor that the program still has.

    Args:
        values: Values by their index among the inputs of a graph.
    """
    tensors = {i: value for i, value in values.items() if _can_bind(value)}
    parts = {
        i: each for i, each in tensors.items() if each.untyped_storage().nbytes() > each.nbytes
    }
    for i in _within_others(parts):
        del tensors[i]
    return tensors


def _can_bind(value: Any) -> bool:
    if not _is_dense(value) or value.is_inference() or not value.numel():
        return False
    return value.device.type != "cpu" or not value.untyped_storage().is_shared()


def _is_dense(value: Any) -> bool:
    return type(value) in _PLAIN and value.layout is torch.strided


def _within_others(parts: Mapping[int, torch.Tensor]) -> set[int]:
    """Return the indices of parts of a larger tensor that the program may still write to."""
    if not parts:
        return set()
    tensors = list(filter(_is_dense, gc.get_objects()))
    if not set(map(id, parts.values())) <= set(map(id, tensors)):
        return set(parts)
    storages = set(map(_torch.tensors.storage_id, parts.values()))
    spans = [_Span.of(each) for each in tensors if _torch.tensors.storage_id(each) in storages]
    return {i for i, part in parts.items() if any(map(_Span.of(part).is_within, spans))}


@dataclass(frozen=True, slots=True)
class _Span:
    """The place of a dense tensor: its storage, its first byte, and the byte after its last."""

    storage: int
    first: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Span:
        first = int(tensor.storage_offset()) * tensor.itemsize
        return cls(_torch.tensors.storage_id(tensor), first, first + int(tensor.nbytes))

    def is_within(self, other: _Span) -> bool:
        """True if the other span is larger and covers all of this one."""
        is_larger = other.end - other.first > self.end - self.first
        covers = other.first <= self.first and self.end <= other.end
        return other.storage == self.storage and is_larger and covers
