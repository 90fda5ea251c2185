"""Whether an engine that failed had written to its inputs, by torch's version counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from composer.records import Reason

Reader = Callable[[Sequence[Any]], object]

UNREADABLE = (RuntimeError, AttributeError)
"""What reading the version of an inference tensor raises."""

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
        held: Tensors that the graph itself holds and writes to.
        blind: Whether nothing is to be read: the graph may write to a tensor that has no version,
            or nobody answers for the engine.

    Attributes:
        read: Gives the versions of a call's tracked arguments, and of what the graph holds;
            ``None`` where there is nothing to read.
        unread: What stands in place of versions then: ``()`` where the graph writes to nothing,
            ``None`` where it cannot be known.
    """

    __slots__ = ("read", "unread")

    def __init__(
        self, tracked: tuple[int, ...], held: tuple[torch.Tensor, ...], *, blind: bool
    ) -> None:
        self.read = None if blind else _reader(tracked, held)
        self.unread: tuple[()] | None = None if blind else ()

    def of(self, args: Sequence[Any]) -> object:
        """The versions now; ``None`` where one of the tensors has none."""
        try:
            return self.read(args) if self.read else self.unread
        except UNREADABLE:
            return None


def _reader(tracked: tuple[int, ...], held: tuple[torch.Tensor, ...]) -> Reader | None:
    """A generated function that reads each version by its own expression.

    A loop takes two to four times as long, and this runs at every call.
    """
    reads = [f"args[{i}]._version" for i in tracked]
    reads += [f"held[{i}]._version" for i in range(len(held))]
    source = f"lambda args: ({''.join(f'{each}, ' for each in reads)})"
    return cast(Reader, eval(source, {"held": held})) if reads else None
