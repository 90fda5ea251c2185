"""What follows when the engine that serves a graph raises: the record of it, and the next engine.

The graph, its policy and what is left of its chain are kept for that; no tensor is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch

from composer import _torch, chain, select, session
from composer.contenders import Contender, bounds_of
from composer.errors import FallbackWarning, Refusal, text_of
from composer.graphs import collectives, writes
from composer.graphs.checkpoints import eager_forward
from composer.graphs.comparison import Bounds
from composer.guard import backward, standby
from composer.guard.sampling import Sampler, cannot_undo
from composer.passes.resolve import SharedPasses
from composer.policy import Policy
from composer.records import (
    FLOOR,
    Attempt,
    CompileReport,
    GraphRequest,
    Outcome,
    PassRecord,
    Reason,
    Status,
    first_line,
)
from composer.select import choice
from composer.telemetry import notices


@dataclass(frozen=True, slots=True)
class _Quarantine:
    """How many calls an engine is left out for, and how many of them there are to be until then."""

    calls: int
    until: int


@dataclass
class Succession:
    """The rest of a chain, for when the engine chosen fails at run time.

    Attributes:
        request: The graph, as the passes of the stages ``torch`` and ``aten`` left it.
        contenders: The chain; where candidates were measured, those that may serve, the best first.
        shared: The passes of the later stages.
        policy: What the user wants.
        early: Records of the passes that ran before every candidate.
        report: The record of this graph, as it stands.
        outcome: Where the walk along the chain ended.
        asked_by_name: Whether the user wrote the chain.
    """

    request: GraphRequest
    contenders: Sequence[Contender]
    shared: SharedPasses
    policy: Policy
    early: tuple[PassRecord, ...]
    report: CompileReport
    outcome: InitVar[Outcome]
    asked_by_name: bool
    _answering: Callable[..., Any] | None = field(default=None, init=False)
    _reverting: Attempt = field(init=False)

    def __post_init__(self, outcome: Outcome) -> None:
        """Let go of the tensors."""
        self._tracked = self._open_to_writes()
        self._apart = cannot_undo(self.request)
        self._collective = collectives.meets_other_ranks(self.request.gm)
        late = bool(self.shared.late)
        self.floor = self._answer if late else eager_forward(self.request.gm)
        if outcome.chosen == FLOOR:
            self.floor = _torch.undisabled(outcome.compiled)
        self._quarantined: dict[int, _Quarantine] = {}
        self._contest = select.Contest.of(self.policy)
        attempts = outcome.attempts
        if outcome.ranking is not None:
            self.contenders = [self.contenders[place] for place in outcome.ranking]
            attempts = tuple(attempts[place] for place in outcome.ranking)
        self._arrive(0, attempts)
        symbols = tuple(
            value if isinstance(value, torch.SymInt | torch.SymFloat) else None
            for value in self.request.example_inputs
        )
        self.request = dataclasses.replace(self.request, example_inputs=symbols)

    def _open_to_writes(self) -> tuple[tuple[int, ...], bool]:
        """Which inputs to look at, whichever engine of the chain serves, and if that tells all."""
        gm, engines = self.request.gm, (each.backend for each in self.contenders)
        trusted = all(e.writes_as_the_graph or e.may_return_original for e in engines)
        if trusted and not writes.may_write(gm) and writes.is_known(gm):
            return (), False
        return writes.tracked_inputs(self.request)

    def rescue(self) -> standby.Rescue | None:
        """What the guard does when the engine raises; ``None`` where it lets the error through."""
        raises = self.policy.on_runtime_error == "raise" or self.policy.strict
        serves = self.report.chosen != FLOOR or self._quarantined
        if raises or not serves:
            return None
        tracked, blind = self._tracked
        held = tuple(writes.written_attributes(self.request.gm))
        return standby.Rescue(
            *(self.floor, self.blame, self.successor, self.retry_at, self.retry),
            *(tracked, held, blind, self._collective, self.reverted),
        )

    def sampler(self) -> Sampler | None:
        """What compares every N-th call, where the policy asks for that."""
        if self.policy.verify != "sample" or self.report.chosen == FLOOR:
            return None
        if self._collective:
            return None
        return Sampler(
            self.policy.sample_every,
            self.floor,
            self.request_for,
            self._bounds,
            self._apart,
            self.report.runtime,
        )

    def _bounds(self) -> Bounds:
        """Those of the one that serves; by now that may be the floor, which has none."""
        serving = (each.bounds for each in self.contenders[self._serving :])
        return next(serving, None) or bounds_of(self.policy)

    def _answer(self, *args: Any) -> Any:
        """The floor where passes run within AOTAutograd's step: made when it is first needed."""
        if self._answering is None:
            with _torch.recaptured(self.request.gm, args):
                self._answering = chain.floor(self.request_for(args), self.shared)
        return self._answering(*args)

    def blame(self, error: Exception, what: str) -> None:
        """Record that the engine failed, and let this graph have it no more until it is retried."""
        attempts = list(self.report.attempts)
        place = max(i for i, attempt in enumerate(attempts) if attempt.accepted)
        engine = attempts[place]
        at = f"at call {self.report.runtime.calls}: {first_line(text_of(error))}"
        if isinstance(error, Refusal):  # it answered, and was found to be wrong
            attempts[place] = dataclasses.replace(
                engine, status=error.status, reason=error.reason, message=at
            )
        else:
            attempts[place] = dataclasses.replace(
                engine,
                status=Status.FAILED,
                reason=Reason.RAISED_AT_RUNTIME,
                message=f"{what} {at}",
                error_type=type(error).__name__,
                traceback="".join(traceback.format_exception(error)),
            )
        self._wait(self._serving, self.report.runtime.calls)
        self._record(tuple(attempts), FLOOR)

    def successor(self, args: Sequence[Any]) -> standby.Engine:
        """The next candidate that is accepted, or the floor, compiled for these inputs."""
        first = self._serving + 1
        outcome, engine = self.walk(args, self.contenders[first:])
        self._arrive(first, outcome.attempts)
        self._record((*self.report.attempts, *outcome.attempts), outcome.chosen, outcome)
        return standby.Engine(self.floor) if outcome.chosen == FLOOR else engine

    def retry_at(self) -> int | None:
        """The call before which an engine that the chain prefers is to be tried again."""
        return min((each.until for each in self._preferred().values()), default=None)

    def retry(self, args: Sequence[Any]) -> standby.Engine | None:
        """The first whose time has come and that is accepted; the wait of the others doubles.

        Where the fastest is wanted it is measured, against the floor.
        """
        calls = self.report.runtime.calls
        due = [place for place, each in self._preferred().items() if each.until < calls]
        for place in due:
            contender = self.contenders[place]
            session.current().release(self.request.graph_key, contender.key)
            outcome, engine = self.walk(args, (contender,), self._contest)
            attempts = (*self.report.attempts, *outcome.attempts)
            if outcome.attempts[0].accepted:
                self._serving = place
                self._record(attempts, outcome.chosen, outcome)
                return engine
            self._wait(place, calls - 1)  # this one is made by another
            self._record(attempts, self.report.chosen)
        return None

    def overtaken(self, outcome: Outcome, first: int) -> tuple[standby.Engine | None, bool]:
        """Record what became of the chain beside the calls, and who serves from now on.

        Args:
            outcome: Its attempts are those of the chain's first candidates, its ranking their
                places; the chain is reduced to those that may serve.
            first: The place of the one that has served.

        Returns:
            The engine; ``None`` where it stays the same. And whether the one before may serve
            again if that fails; it comes next then.
        """
        ahead = list(outcome.ranking or ())
        stays, may_return = outcome.attempts[first].accepted, first in ahead
        if may_return and not stays:
            ahead.remove(first)
            ahead.insert(1, first)
        since = self.report.attempts[first + 1 :]
        self._reverting = dataclasses.replace(
            outcome.attempts[first], status=Status.SUCCEEDED, reason=None, message=""
        )
        self.contenders = [self.contenders[place] for place in ahead]
        waiting = ((new, self._quarantined.get(old)) for new, old in enumerate(ahead))
        self._quarantined = {new: each for new, each in waiting if each is not None}
        self._arrive(0, [outcome.attempts[place] for place in ahead])
        attempts = (*outcome.attempts, *since)
        self._record(attempts, outcome.chosen, None if stays else outcome, alongside=True)
        return None if stays else standby.Engine(outcome.compiled), may_return

    def reverted(self) -> None:
        """Record that the engine which was taken over from serves again."""
        self._serving += 1
        attempt = self._reverting
        self._record((*self.report.attempts, attempt), attempt.backend)

    def tell(self, timing: str) -> None:
        """Record why nothing came of what went on beside the calls."""
        attempts = [
            dataclasses.replace(each, engine=each.engine | {"timing": timing})
            if "timing" in each.engine
            else each
            for each in self.report.attempts
        ]
        self._record(tuple(attempts), self.report.chosen, alongside=True)

    def floor_in_time(self, args: Sequence[Any]) -> choice.Made:
        """The floor, made for these inputs if that takes a compile, and its passes."""
        if not self.shared.late:
            return self.floor, ()
        outcome, _ = self.walk(args, ())
        self._answering = outcome.compiled
        return self.floor, outcome.passes

    def walk(
        self,
        args: Sequence[Any],
        contenders: Sequence[Contender],
        contest: select.Contest | None = None,
        *,
        alongside: bool = False,
    ) -> tuple[Outcome, standby.Engine]:
        """Try some candidates again, or for the first time, after Dynamo's compile is over.

        Args:
            args: The inputs to build for.
            contenders: Which.
            contest: How the fastest is found; ``None`` takes the first that is accepted.
            alongside: Whether the program runs meanwhile.
        """
        request = dataclasses.replace(self.request_for(args), alongside=alongside)
        with _torch.recaptured(request.gm, args), backward.watched() as backwards:
            outcome = chain.walk(
                *(request, contenders, self.shared, contest), strict=False, at_run_time=True
            )
        return outcome, standby.Engine(outcome.compiled, backwards)

    def _arrive(self, first: int, attempts: Sequence[Attempt]) -> None:
        """Note where in the chain the one stands that serves (the floor behind its end)."""
        accepted = (place for place, each in enumerate(attempts, first) if each.accepted)
        self._serving = next(accepted, len(self.contenders))
        for place, attempt in enumerate(attempts, first):
            if attempt.reason is Reason.QUARANTINED and place not in self._quarantined:
                self._wait(place, self.report.runtime.calls)

    def _preferred(self) -> dict[int, _Quarantine]:
        """Those in quarantine that stand before the one that serves, in the chain's order."""
        return {p: each for p, each in sorted(self._quarantined.items()) if p < self._serving}

    def _wait(self, place: int, since: int) -> None:
        """Have an engine wait from this call on, twice as long as the last time."""
        session.current().quarantine(self.request.graph_key, self.contenders[place].key)
        if self.policy.retry_after is None:
            return
        before = self._quarantined.get(place)
        calls = 2 * before.calls if before else self.policy.retry_after
        self._quarantined[place] = _Quarantine(calls, since + calls)

    def request_for(self, args: Sequence[Any]) -> GraphRequest:
        """The graph, with the inputs of a call."""
        inputs = zip(self.request.example_inputs, args, strict=True)
        given = tuple(arg if symbol is None else symbol for symbol, arg in inputs)
        return dataclasses.replace(self.request, example_inputs=given)

    def _record(
        self,
        attempts: tuple[Attempt, ...],
        chosen: str,
        outcome: Outcome | None = None,
        *,
        alongside: bool = False,
    ) -> None:
        passes = (*self.early, *outcome.passes) if outcome else self.report.passes
        changed = dataclasses.replace(self.report, attempts=attempts, chosen=chosen, passes=passes)
        here = session.current()
        here.replace(self.report, changed)
        self.report = changed
        here.sinks.emit(changed, first=False)
        # It is in the log as well; as an error it has nobody to reach beside the calls.
        nobodys = contextlib.suppress(FallbackWarning) if alongside else contextlib.nullcontext()
        with nobodys:
            notices.warn_of_fallbacks(changed, here.warned, asked_by_name=self.asked_by_name)
