"""The size of a call: one number by which the calls of a graph with dynamic sizes are ordered.

It is the product of the sizes that are symbols, so the batch where that is the only one, and batch
times length where both are. A size that never changes does no harm: it is a factor of every size.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.fx

from composer import _torch
from composer.records import GraphRequest

T = TypeVar("T")


def positions(gm: torch.fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of a graph's inputs that are sizes of its other inputs.

    Numbers that are symbols and no size, such as a factor, are left out.
    """
    fakes = _torch.sources.example_values(gm)
    tensors = filter(torch.is_tensor, fakes)
    sizes = itertools.chain.from_iterable(map(_torch.symbols.symbolic_numbers, tensors))
    used = frozenset[str]().union(*map(_torch.symbols.symbols, sizes))
    return tuple(i for i, fake in enumerate(fakes) if _torch.symbols.symbols(fake) & used)


def size_of(request: GraphRequest) -> int | None:
    """Return the size of the call that a request holds the inputs of; ``None`` if it has none."""
    numbers = [_torch.symbols.hint(request.example_inputs[i]) for i in positions(request.gm)]
    if not numbers or None in numbers:
        return None
    return int(math.prod(numbers))


def reader(found: Sequence[int]) -> Callable[[Sequence[Any]], int]:
    """Return a function that gives the size of a call from its arguments.

    It runs at every call. An expression of its own takes a third of the time of a loop.
    """
    source = f"lambda args: {' * '.join(f'args[{i}]' for i in found)}"
    return cast("Callable[[Sequence[Any]], int]", eval(source))


def ranges(by_size: Mapping[int, T]) -> list[tuple[int, T]]:
    """Return what holds for each range of sizes, with the least size of the range.

    A range begins at the geometric mean of two measured sizes. Neighbours that are equal are one
    range. The first range begins at 0.

    Args:
        by_size: What holds for the sizes that were measured; one at least.
    """
    sizes = sorted(by_size)
    found = [(0, by_size[sizes[0]])]
    for lower, upper in itertools.pairwise(sizes):
        if by_size[lower] != by_size[upper]:
            found.append((math.isqrt(lower * upper) + 1, by_size[upper]))
    return found


def at(size: int, starts: Sequence[tuple[int, T]]) -> T:
    """Return what holds for a size, of the :func:`ranges`."""
    return starts[bisect.bisect(starts, size, key=operator.itemgetter(0)) - 1][1]


def ratio(one: float | None, other: float | None) -> float:
    """Return how many times as large one of two sizes is as the other; 0 and ``None`` are as 1."""
    lower, upper = sorted((one or 1, other or 1))
    return upper / lower
