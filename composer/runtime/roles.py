"""The records that a served graph works with: its engine, the rescue, and who may take over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from composer.records import Reason
from composer.runtime.backward import Backwards
from composer.runtime.barrier import Barrier

Compiled = Callable[..., Any]

WRITTEN = (
    f"the engine had written to its inputs ({Reason.MUTATED_INPUTS}), "
    "or another thread of the program had"
)
UNSEEN = (
    f"the engine may have written to its inputs ({Reason.MUTATED_INPUTS}): "
    "one is an inference tensor, without a version"
)


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
        blame: Records the error, and what raised it, and puts the engine into quarantine.
        successor: Compiles the next candidate for these inputs, or returns ``floor``.
        retry_at: The number of the call, the first being 0, before which an engine in quarantine
            is to be tried again; ``None`` for never.
        retry: Compiles that engine for these inputs; ``None`` if it is not accepted.
        tracked: Positions of the inputs whose versions tell whether the engine wrote to them.
        held: Tensors that the graph itself holds and writes to; their versions are read as well.
        blind: Whether the graph may write to a tensor that has no version.
        collective: Whether the graph waits for other ranks, which would not wait a second time.
        reverted: Records that the engine which had been replaced serves again.
        publish: Tells sinks and the user of what these have recorded, once the change is made. It
            may raise, where the user turned composer's warnings into errors.
    """

    floor: Compiled
    blame: Callable[[BaseException, str], None]
    successor: Callable[[Sequence[Any]], Engine]
    retry_at: Callable[[], int | None]
    retry: Callable[[Sequence[Any]], Engine | None]
    tracked: tuple[int, ...]
    held: tuple[torch.Tensor, ...]
    blind: bool
    collective: bool
    reverted: Callable[[], None]
    publish: Callable[[], None]

    @property
    def once_only(self) -> str:
        """Why a call that an engine has begun cannot be answered by another; empty where it can."""
        if self.collective:
            return "the engine may have begun what other ranks wait for"
        return UNSEEN if self.blind else ""


TakeOver = Callable[[bool], tuple[Engine | None, bool]]
"""Names the engine that takes over; ``None`` leaves everything as it is.

Given whether the graph is still served by the same engine as when the work began. The second result
says whether the engine that is replaced is to be kept for the first calls.
"""


@dataclass(frozen=True, slots=True)
class Seat:
    """What background work may do with a served graph.

    Attributes:
        is_wanted: Whether the graph can still be called, and its engine is the same as before.
        take_over: Asks its argument for an engine, which serves from the next call on. No other
            change of engines happens meanwhile.
        barred: Puts a barrier before the calls, for as long as the context lasts.
    """

    is_wanted: Callable[[], bool]
    take_over: Callable[[TakeOver], None]
    barred: Callable[[], AbstractContextManager[Barrier]]


class Later(Protocol):
    """Background work that begins with the second call of a graph."""

    def begin(self, args: Sequence[Any], run: Compiled, seat: Seat) -> None:
        """Begin the work; the call is made when this returns.

        Args:
            args: The inputs of the call.
            run: What serves the graph.
            seat: Access to the graph.
        """
