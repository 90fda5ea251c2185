"""How what an engine gives differs from what eager gives, in words."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-7,
}
"""Relative; the absolute one is a tenth. Every other dtype is compared exactly."""


def difference(expected: Any, actual: Any, values: bool = True) -> str:
    """How what was found differs from what eager gives; empty if it does not.

    Args:
        expected: Nested values, or the exception that eager raises.
        actual: The same of the engine.
        values: Compare numbers, too, not only what kind of tensors hold them.
    """
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        if isinstance(expected, Exception) and isinstance(actual, Exception):
            return ""
        raised = "eager" if isinstance(expected, Exception) else "composer"
        return f"{raised} raises {described(expected if raised == 'eager' else actual)}"
    ours, spec = tree_flatten(actual)
    theirs, expected_spec = tree_flatten(expected)
    if spec != expected_spec:
        return f"structure {spec}, not {expected_spec}"
    pairs = enumerate(zip(theirs, ours, strict=True))
    found = (f"leaf {i}: {said}" for i, pair in pairs if (said := leaf_difference(*pair, values)))
    return next(found, "")


def leaf_difference(expected: Any, actual: Any, values: bool) -> str:
    """The same for two tensors, numbers or other plain values."""
    if type(expected) is not type(actual):
        return f"{type(actual).__name__}, not {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        kinds = metadata(expected), metadata(actual)
        if kinds[0] != kinds[1]:
            return f"{kinds[1]}, not {kinds[0]}"
        return value_difference(expected.detach(), actual.detach()) if values else ""
    if isinstance(expected, float) and values:
        return "" if math.isclose(expected, actual, rel_tol=1e-4) else f"{actual}, not {expected}"
    plain = isinstance(expected, int | str) and values
    return f"{actual!r}, not {expected!r}" if plain and expected != actual else ""


def metadata(tensor: torch.Tensor) -> str:
    """Dtype, shape and strides, without the strides of dimensions of size one, in words."""
    said = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided:
        return f"{said} {tensor.layout}"
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(stride for size, stride in sizes if size > 1) if tensor.numel() else ()
    conjugated = " conjugated" if tensor.is_conj() else ""
    return f"{said} strides {strides} {tensor.requires_grad}{conjugated}"


def value_difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    """How many elements differ, and the first of them."""
    if expected.layout is not torch.strided or expected.is_quantized:
        return ""
    rtol = TOLERANCES.get(expected.dtype)
    if rtol is None:
        wrong = expected != actual
    else:
        wrong = ~torch.isclose(actual, expected, rtol=rtol, atol=rtol / 10, equal_nan=True)
    if not wrong.any():
        return ""
    first = tuple(wrong.nonzero()[0].tolist())
    pair = f"{actual[first].item()!r}, not {expected[first].item()!r}"
    return f"{int(wrong.sum())} of {wrong.numel()} elements, at {first} {pair}"


def described(error: BaseException) -> str:
    """The error's type and first line."""
    return f"{type(error).__name__}: {tidy(str(error))}"


def tidy(text: str) -> str:
    """The first line, without places in files, folders and addresses."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = re.sub(r" \((?:/|<)[^()]*:\d+\)", "", line)
    line = re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/", "", line)
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", line)[:400]
