"""Detects by torch's version counters whether an engine that failed had written to its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from composer.records import Reason

Reader = Callable[[Sequence[Any]], object]

UNREADABLE = (RuntimeError, AttributeError)
"""The errors raised when the version of an inference tensor is read."""

WRITTEN = (
    f"the engine had written to its inputs ({Reason.MUTATED_INPUTS}), "
    "or another thread of the program had"
)
UNSEEN = (
    f"the engine may have written to its inputs ({Reason.MUTATED_INPUTS}): "
    "one is an inference tensor, without a version"
)


class Versions:
    """Reads the versions of the tensors that a graph may write to.

    Args:
        tracked: Positions of the inputs whose versions tell whether the engine wrote to them.
        held: The graph's own tensors that it writes to.
        blind: True if nothing is to be read, because the graph may write to a tensor that has no
            version, or because no other engine would answer after a failure.

    Attributes:
        read: Returns the versions of a call's tracked arguments and of the held tensors; ``None``
            if there is nothing to read.
        unread: The value in place of versions in that case: ``()`` if the graph writes to nothing,
            ``None`` if writes cannot be detected.
    """

    __slots__ = ("read", "unread")

    def __init__(
        self, tracked: tuple[int, ...], held: tuple[torch.Tensor, ...], *, blind: bool
    ) -> None:
        self.read = None if blind else _reader(tracked, held)
        self.unread: tuple[()] | None = None if blind else ()

    def of(self, args: Sequence[Any]) -> object:
        """Return the current versions; ``None`` if one of the tensors has no version."""
        try:
            return self.read(args) if self.read else self.unread
        except UNREADABLE:
            return None


def _reader(tracked: tuple[int, ...], held: tuple[torch.Tensor, ...]) -> Reader | None:
    """Generate a function that reads each version with an expression of its own.

    It runs at every call, and a loop would take two to four times as long.
    """
    reads = [f"args[{i}]._version" for i in tracked]
    reads += [f"held[{i}]._version" for i in range(len(held))]
    source = f"lambda args: ({''.join(f'{each}, ' for each in reads)})"
    return cast(Reader, eval(source, {"held": held})) if reads else None
