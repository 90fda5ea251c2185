"""Conditions under which decompositions decline a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from composer.lowering.operators.entry import Function


def only_for(predicate: Callable[[torch.Tensor], Any]) -> Callable[[Function], Function]:
    """A decorator that declines a call if the predicate is false for its first operand."""
    return lambda function: functools.partial(_call_if, predicate, function)


def _call_if(
    predicate: Callable[[torch.Tensor], Any],
    function: Function,
    x: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return function(x, *args, **kwargs) if predicate(x) else NotImplemented


def is_float(value: torch.Tensor) -> bool:
    """True for a tensor of real floating-point numbers."""
    return value.dtype.is_floating_point


def is_float32(value: torch.Tensor) -> bool:
    """True for a tensor in float32."""
    return value.dtype is torch.float32


def is_wide(value: torch.Tensor) -> bool:
    """True for dtypes in which torch computes without widening; it may widen half precision."""
    return value.dtype in (torch.float32, torch.float64)


def is_on_cpu(value: torch.Tensor) -> bool:
    """True for a tensor in the memory of the CPU."""
    return value.device.type == "cpu"


def are_known(sizes: Iterable[Any]) -> bool:
    """True if all sizes are numbers; a dynamic size is a symbol."""
    return all(isinstance(size, int) for size in sizes)


_MOST_ADDED = 2**22
"""The most elements that a decomposition may give to a tensor that eager does not make."""


def has_elements(value: torch.Tensor) -> bool:
    """True if the number of elements is known, and is not zero."""
    return isinstance(value.numel(), int) and value.numel() > 0


def may_add(count: Any) -> bool:
    """True if a decomposition may make a tensor with this number of elements, and not zero."""
    return isinstance(count, int) and 0 < count <= _MOST_ADDED
