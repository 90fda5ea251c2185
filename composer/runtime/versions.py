"""Whether an engine that failed had written to its inputs, by torch's version counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from composer.runtime.roles import Rescue

Reader = Callable[[Sequence[Any]], object]

UNREADABLE = (RuntimeError, AttributeError)
"""What reading the version of an inference tensor raises."""


class Versions:
    """Reads the versions of the tensors that a graph may write to.

    Attributes:
        read: Gives the versions of a call's tracked arguments, and of what the graph holds;
            ``None`` where there is nothing to read.
        unread: What stands in place of versions then: ``()`` where the graph writes to nothing,
            ``None`` where it may write to a tensor that has no version.
    """

    __slots__ = ("read", "unread")

    def __init__(self, rescue: Rescue | None) -> None:
        blind = rescue is None or rescue.blind
        self.read = None if blind else _reader(cast(Rescue, rescue))
        self.unread: tuple[()] | None = None if blind else ()

    def of(self, args: Sequence[Any]) -> object:
        """The versions now; ``None`` where one of the tensors has none."""
        try:
            return self.read(args) if self.read else self.unread
        except UNREADABLE:
            return None


def _reader(rescue: Rescue) -> Reader | None:
    """A generated function that reads each version by its own expression.

    A loop takes two to four times as long, and this runs at every call.
    """
    reads = [f"args[{i}]._version" for i in rescue.tracked]
    reads += [f"held[{i}]._version" for i in range(len(rescue.held))]
    source = f"lambda args: ({''.join(f'{each}, ' for each in reads)})"
    return cast(Reader, eval(source, {"held": rescue.held})) if reads else None
