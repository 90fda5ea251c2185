"""Has an engine written to the tensors that a graph must find as they were?

torch counts the writes to a tensor in its version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from composer.guard.standby import Rescue

Reader = Callable[[Sequence[Any]], object]

UNREADABLE = (RuntimeError, AttributeError)
"""What reading the version of an inference tensor raises."""


class Versions:
    """The versions of the tensors that a graph's rescue looks at.

    Attributes:
        read: Reads them, of a call's arguments and of what the graph holds; ``None`` where there
            are none to read.
        unread: What stands for them there: ``None`` where nobody can tell what was written.
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
    """Written out as an expression that names each tensor.

    A loop over them takes two to four times as long, and this stands in the way of every call.
    """
    reads = [f"args[{i}]._version" for i in rescue.tracked]
    reads += [f"held[{i}]._version" for i in range(len(rescue.held))]
    source = f"lambda args: ({''.join(f'{each}, ' for each in reads)})"
    return cast(Reader, eval(source, {"held": rescue.held})) if reads else None
