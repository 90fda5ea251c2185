"""Tells if rows along one dimension of a tensor, such as a token's in a cache, are few and long.

To write such rows, Torchlib transposes the whole tensor so that the dimension comes first, and then
transposes it back. Instead, each row can be addressed by all its indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from composer.graphs.nodes import are_static

_MOST = 1 << 16
"""Number of rows whose indices take some MiB as constants of a model."""

_LEAST = 16
"""Length of a row, in elements, compared with which its indices are few."""


def are_few(shape: Sequence[Any], dim: int, count: Any) -> bool:
    """True if the rows at ``count`` places along a dimension of this shape are few and long."""
    if not are_static((*shape, count)):
        return False
    number, length = math.prod(shape[:dim]) * count, math.prod(shape[dim + 1 :])
    return bool(number <= _MOST and length >= _LEAST)
