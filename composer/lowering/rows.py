"""Rows that are put along one dimension of a tensor, as the keys of a token are to a cache.

Torchlib has that dimension come first, and moves all of the tensor for it, there and back. Rows can
be named one by one instead, by all their indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_MOST = 1 << 16
"""Rows: the indices of that many are a model's constants of some MiB."""

_LEAST = 16
"""Numbers in a row, beside which its indices are few."""


def are_few(shape: Sequence[Any], dim: int, count: Any) -> bool:
    """Whether the rows that so many places along a dimension name are few, and long.

    Args:
        shape: Of the tensor.
        dim: The dimension.
        count: How many places there are.
    """
    if not all(isinstance(size, int) for size in (*shape, count)):
        return False
    number, length = math.prod(shape[:dim]) * count, math.prod(shape[dim + 1 :])
    return bool(number <= _MOST and length >= _LEAST)
