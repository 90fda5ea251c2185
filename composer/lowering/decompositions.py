"""Makes the table by which AOTAutograd decomposes operators while it makes a graph functional.

The table combines the engine's entries, composer's entries (:mod:`composer.lowering.operators`) and
the exporter's decompositions, with priority in this order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from composer import _torch
from composer.lowering.export.vocabulary import vocabulary
from composer.lowering.operators import operators
from composer.lowering.operators.entry import Function, Operators


def decompositions(entries: Operators, training: bool) -> dict[Any, Function]:
    """Return the table for AOTAutograd: an engine's entries first, then composer's, then others.

    Args:
        entries: The engine's entries.
        training: True if a backward will be made.
    """
    table = dict(_exporters())
    for operator, entry in itertools.chain(operators().items(), entries.items()):
        function = entry.decompose
        if training and entry.in_training is not None:
            function = entry.in_training
        if function is not None:
            others = None if entry.or_whole else table.get(operator)
            table[operator] = _of_real_numbers(_first_of(function, others))
    return table


@functools.cache
def _exporters() -> Mapping[Any, Function]:
    """Return the exporter's decompositions: about a thousand, so they are made once.

    Operators that draw random numbers are left out, since a decomposition would draw other numbers
    than eager's kernel.
    """
    return {
        operator: _of_real_numbers(function)
        for operator, function in vocabulary().decompositions.items()
        if not _torch.operators.draws_itself(operator)
    }


def _of_real_numbers(function: Function) -> Function:
    """Leave calls with complex numbers whole: torch runs them, and few entries support them."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        values, _ = _torch.tensors.flatten((args, kwargs))
        return NotImplemented if any(map(_is_complex, values)) else function(*args, **kwargs)

    return decompose


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


def _first_of(first: Function, second: Function | None) -> Function:
    """Return a function that calls ``first``, and ``second`` if that returns ``NotImplemented``."""
    if second is None:
        return first

    def decompose(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        return second(*args, **kwargs) if result is NotImplemented else result

    return decompose
