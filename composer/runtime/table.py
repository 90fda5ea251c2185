"""The states of a served graph, and what follows from each event: one row for each transition.

:class:`composer.runtime.served.ServedGraph` does what the table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """The states of a served graph."""

    SERVING = "serving"
    QUARANTINED = "quarantined"
    EAGER = "eager"
    FREED = "freed"


class Event(StrEnum):
    """What happens to a served graph."""

    RAISED = "the engine raises"
    WROTE = "it raises and may have written to its inputs, or other ranks take part"
    WRONG = "a sampled call shows wrong numbers"
    LACKED = "it lacks memory, for the first or second time"
    STARVED = "it lacks memory for the third time"
    BACKWARD = "its backward raises, and torch computes the gradients"
    BACKWARD_LOST = "its backward raises, and its arguments are gone or changed"
    ACCEPTED = "a candidate is compiled and accepted: the next, the chosen, or one from quarantine"
    EXHAUSTED = "no candidate is left, or eager is found to be the fastest"
    FREED = "the program drops the graph"


class Answer(StrEnum):
    """Who answers the call, or the backward, at hand."""

    EAGER = "eager"
    AGAIN = "the engine once more, then eager"
    TORCH = "torch's own backward"
    NOBODY = "nobody: the error is raised"


class Next(StrEnum):
    """Who serves the next call."""

    SAME = "the same engine"
    CANDIDATE = "the next candidate, compiled at that call"
    NEW = "the new engine"
    EAGER = "eager"
    NOBODY = "nobody"


class Row(NamedTuple):
    """What follows from an event in a state.

    Without an answer there is no call at hand, or whoever serves the next call answers it.
    """

    answer: Answer | None
    to: State
    serves: Next


TABLE: Mapping[tuple[Event, State], Row] = {
    (Event.RAISED, State.SERVING): Row(Answer.EAGER, State.QUARANTINED, Next.CANDIDATE),
    (Event.WROTE, State.SERVING): Row(Answer.NOBODY, State.QUARANTINED, Next.CANDIDATE),
    (Event.WRONG, State.SERVING): Row(Answer.EAGER, State.QUARANTINED, Next.CANDIDATE),
    (Event.LACKED, State.SERVING): Row(Answer.AGAIN, State.SERVING, Next.SAME),
    (Event.STARVED, State.SERVING): Row(Answer.AGAIN, State.QUARANTINED, Next.CANDIDATE),
    (Event.BACKWARD, State.SERVING): Row(Answer.TORCH, State.QUARANTINED, Next.CANDIDATE),
    (Event.BACKWARD_LOST, State.SERVING): Row(Answer.NOBODY, State.QUARANTINED, Next.CANDIDATE),
    (Event.ACCEPTED, State.SERVING): Row(None, State.SERVING, Next.NEW),
    (Event.ACCEPTED, State.QUARANTINED): Row(None, State.SERVING, Next.NEW),
    (Event.ACCEPTED, State.EAGER): Row(None, State.SERVING, Next.NEW),
    (Event.EXHAUSTED, State.SERVING): Row(None, State.EAGER, Next.EAGER),
    (Event.EXHAUSTED, State.QUARANTINED): Row(None, State.EAGER, Next.EAGER),
    (Event.EXHAUSTED, State.EAGER): Row(None, State.EAGER, Next.EAGER),
    (Event.FREED, State.SERVING): Row(None, State.FREED, Next.NOBODY),
    (Event.FREED, State.QUARANTINED): Row(None, State.FREED, Next.NOBODY),
    (Event.FREED, State.EAGER): Row(None, State.FREED, Next.NOBODY),
    (Event.LACKED, State.FREED): Row(Answer.TORCH, State.FREED, Next.NOBODY),
    (Event.BACKWARD, State.FREED): Row(Answer.TORCH, State.FREED, Next.NOBODY),
    (Event.BACKWARD_LOST, State.FREED): Row(Answer.NOBODY, State.FREED, Next.NOBODY),
}
"""What follows from each event, in each state in which it can happen."""
