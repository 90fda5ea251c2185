"""Which weights an engine may take in: those whose change composer could see."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from composer import _torch


def watchable(values: Mapping[int, Any]) -> dict[int, torch.Tensor]:
    """Those of some values whose change could be seen, and whose memory could be shared.

    Inference tensors have no version counter; subclasses and sparse tensors have no one address.
    Other processes write to memory that they share with this one, as the learner of a model does
    whose actors run it, and raise no version here. Of memory on a GPU torch cannot tell. Nor does a
    write to a vector of all parameters raise the versions of those that are parts of it
    (``torch.nn.utils.vector_to_parameters``).
    """
    fit = {i: each for i, each in values.items() if _can_bind(each)}
    parts = {i: t for i, t in fit.items() if t.untyped_storage().nbytes() > t.nbytes}
    unseen = _within_others(parts) if parts else set()
    return {i: each for i, each in fit.items() if i not in unseen}


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _can_bind(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in _PLAIN
        and value.layout is torch.strided
        and not value.is_inference()
        and value.numel() > 0
        and not (value.device.type == "cpu" and value.untyped_storage().is_shared())
    )


def _within_others(parts: Mapping[int, torch.Tensor]) -> set[int]:
    """Those that lie within a larger tensor that the program may still have, and write to."""
    memories = set(map(_torch.tensors.storage_id, parts.values()))
    tensors = [each for each in gc.get_objects() if type(each) in _PLAIN]
    if not set(map(id, parts.values())) <= set(map(id, tensors)):  # after gc.freeze(): hidden
        return set(parts)
    strided = (each for each in tensors if each.layout is torch.strided)
    others = [_span(each) for each in strided if _torch.tensors.storage_id(each) in memories]
    spans = {i: _span(each) for i, each in parts.items()}
    return {
        i
        for i, (memory, first, end) in spans.items()
        if any(
            m == memory and f <= first and end <= e and e - f > end - first for m, f, e in others
        )
    }


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The storage, and the bytes of it, of a tensor that is dense."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    return _torch.tensors.storage_id(tensor), first, first + int(tensor.nbytes)
