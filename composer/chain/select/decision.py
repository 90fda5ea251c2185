"""A decision: which candidates may serve a graph, as a benchmark that is over has found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer.chain.select.choice import Tried, fallback_of
from composer.errors import SandboxRefusal
from composer.records import Attempt, End, Outcome, Reason, Status

_ONE_TOO_MANY = "it was the fastest at this size, but the policy allows no further engine (ranges)"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is known of the candidates of a graph before one of them is built here.

    Attributes:
        attempts: The records of the candidates, in the order of the chain. It may end before the
            chain does.
        ranking: The places of the candidates that may serve, best first. Empty if eager is to.
        lasts: True if it is to be remembered; False if it would probably differ the next time, or
            is remembered already.
        in_sandbox: True if a sandbox has run the candidates on this graph just now.
        cpu_seconds: CPU time that the sandbox took.
    """

    attempts: tuple[Attempt, ...]
    ranking: tuple[int, ...]
    lasts: bool = True
    in_sandbox: bool = True
    cpu_seconds: float = 0.0

    @property
    def winner(self) -> int | None:
        """The place of the best candidate; ``None`` if eager is to serve."""
        return next(iter(self.ranking), None)

    @property
    def size(self) -> int | None:
        """The size of the call that the candidates were measured at; ``None`` if none is known."""
        timings = [each.timing for each in self.attempts if isinstance(each.timing, dict)]
        found = timings[0].get("size") if timings else None
        return None if found is None else int(found)  # JSON may have made it a float

    @property
    def under_load(self) -> bool:
        """True if other programs kept taking the cores when the candidates were measured."""
        timings = (each.timing for each in self.attempts if isinstance(each.timing, dict))
        return any(each.get("under_load") for each in timings)

    def serving_from(self, place: int | None) -> tuple[Attempt, ...]:
        """Return the attempts. If another candidate serves than has won, the winner's says why."""
        if place == self.winner:
            return self.attempts
        return tuple(_left_out(each, _ONE_TOO_MANY) for each in self.attempts)

    def unbuilt(self, eager: Callable[..., Any]) -> Outcome:
        """Return what is to be remembered of this decision, although nothing was built here."""
        if self.winner is None:
            return self.outcome(None, fallback_of(eager, ()), {})
        return self.outcome(self.winner, Tried(self.attempts[self.winner], eager), {})

    def outcome(self, place: int | None, serves: Tried, refused: Mapping[int, Tried]) -> Outcome:
        """Return the outcome of a walk that follows this decision.

        Args:
            place: The place of the candidate that serves; ``None`` for the eager fallback.
            serves: That candidate, as it was built here, or the eager fallback.
            refused: Candidates that stood before it in the ranking, and were not accepted here.
        """
        here = {p: End(each.attempt, each.error) for p, each in refused.items()}
        if place is not None:
            here[place] = End(self._built_here(place, serves.attempt), None)
        assert serves.compiled is not None
        known = {p: _end_of(each) for p, each in enumerate(self.attempts)}
        ends = known | here
        return Outcome(
            ends=tuple(ends[p] for p in sorted(ends)),
            chosen=serves.attempt.backend,
            compiled=serves.compiled,
            passes=serves.passes,
            bounds=serves.bounds,
            ranking=tuple(each for each in self.ranking if _may_serve(refused.get(each))),
        )

    def _built_here(self, place: int, attempt: Attempt) -> Attempt:
        """Return an attempt of now with the measured times, and the seconds of its first build.

        An engine that serves already keeps the seconds of the build before it served.
        """
        if place >= len(self.attempts):
            return attempt
        earlier = self.attempts[place]
        if earlier.seconds:
            facts = {"built_apart": {"seconds": round(earlier.seconds, 3)}} | attempt.engine
            attempt = dataclasses.replace(attempt, engine=facts)
        return attempt.timed(earlier.timing)


def _may_serve(refused: Tried | None) -> bool:
    """Return True for a candidate that was not refused, or that only waits in quarantine."""
    return refused is None or refused.attempt.reason is Reason.QUARANTINED


def _end_of(attempt: Attempt) -> End:
    """Return an attempt of earlier, of a candidate that does not serve, with its error."""
    if attempt.status is Status.NOT_CHOSEN:
        return End(attempt, None)
    attempt = _left_out(attempt, "it was accepted, and not measured")
    assert attempt.reason is not None
    ended = attempt.status, attempt.reason, attempt.message
    return End(attempt, SandboxRefusal(*ended, attempt.error_type, attempt.traceback))


def _left_out(attempt: Attempt, why: str) -> Attempt:
    """Return the attempt; if it was accepted, as that of a candidate that does not serve."""
    if not attempt.accepted:
        return attempt
    return dataclasses.replace(attempt, status=Status.SKIPPED, reason=Reason.POLICY, message=why)
