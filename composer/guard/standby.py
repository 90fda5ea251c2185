"""What stands by a graph that is served: its engine, what answers for that, what may take over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from composer.guard.backward import Backwards
from composer.guard.gate import Gate

Compiled = Callable[..., Any]

WRITTEN = "the engine had written to its inputs"


@dataclass(frozen=True, slots=True)
class Engine:
    """What serves a graph: the compiled callable, and the backwards that belong to it."""

    compiled: Compiled
    backwards: Backwards | None = None


@dataclass(frozen=True, slots=True)
class Rescue:
    """What there is to do when the engine of a graph raises.

    Attributes:
        floor: Answers the call in its place; what it raises is the program's own error.
        blame: Told of the error, and what raised it, after which the engine is not called for this
            graph. May raise in its turn, where the policy asks for that.
        successor: Compiles the next candidate for these inputs, or returns ``floor``.
        retry_at: The number of the call, the first being 0, before which an engine in quarantine
            is to be tried again; ``None`` for never.
        retry: Tries that: compiles it for these inputs; ``None`` if it is not accepted.
        tracked: Positions of the inputs that are looked at for writes.
        held: Tensors of the graph's own that it writes to, and that are looked at as well.
        blind: Whether there are others that the graph may write to and that have no version.
        collective: Whether the graph waits for other ranks, which would not do so a second time.
        reverted: Told that the engine which was taken over from serves again.
    """

    floor: Compiled
    blame: Callable[[Exception, str], None]
    successor: Callable[[Sequence[Any]], Engine]
    retry_at: Callable[[], int | None]
    retry: Callable[[Sequence[Any]], Engine | None]
    tracked: tuple[int, ...]
    held: tuple[torch.Tensor, ...]
    blind: bool
    collective: bool = False
    reverted: Callable[[], None] = lambda: None

    @property
    def once_only(self) -> str:
        """Why no call can be answered once an engine has begun it; empty where one can."""
        if self.collective:
            return "the engine may have begun what other ranks wait for"
        return WRITTEN if self.blind else ""


TakeOver = Callable[[bool], tuple[Engine | None, bool]]


@dataclass(frozen=True, slots=True)
class Seat:
    """A graph's place to be served from, for what goes on beside its calls.

    Attributes:
        is_wanted: Whether the graph can still be called, and is served as it was.
        take_over: Has what its argument returns serve it, from the next call on; ``None`` changes
            nothing. It is told whether the graph is served as it was, which stays so meanwhile, and
            says as well whether the one before is to be kept for the first calls.
        gated: Puts a gate at the calls, for as long as the context lasts.
    """

    is_wanted: Callable[[], bool]
    take_over: Callable[[TakeOver], None]
    gated: Callable[[], AbstractContextManager[Gate]]


class Later(Protocol):
    """What begins with the second call of a graph."""

    def begin(self, args: Sequence[Any], run: Compiled, seat: Seat) -> None:
        """Begin; the call waits for it to return.

        Args:
            args: Of the call, which comes after.
            run: What serves the graph.
            seat: Its place.
        """
