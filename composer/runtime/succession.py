"""What follows when the engine that serves a graph fails at run time.

The failure is recorded, the engine goes into quarantine, and the next candidate of the chain is
compiled. The graph, its policy and its chain are kept for that; the first call's inputs are not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer import _torch, chain, forks, select, session, verify
from composer.contenders import Contender, bounds_of
from composer.errors import FallbackWarning, Refusal, first_line, text_of
from composer.floor import make_floor
from composer.graphs import collectives, writes
from composer.graphs.checkpoints import eager_forward
from composer.graphs.comparison import Bounds, Values
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
)
from composer.runtime import backward, roles
from composer.runtime.sampling import Sampler, cannot_undo
from composer.select import choice
from composer.telemetry import notices


@dataclass(frozen=True, slots=True)
class _Quarantine:
    """For how many calls an engine is left out, and the call before which it is tried again."""

    calls: int
    until: int


class Succession:
    """One graph's chain after the compile: who serves, who is in quarantine, and who comes next.

    Args:
        request: The graph, as the passes of the stages ``torch`` and ``aten`` left it; of the
            example inputs only the symbols are kept.
        contenders: The chain.
        shared: The passes of the later stages.
        policy: The policy in force for the graph.
        early: Records of the passes that ran before every candidate.
        report: The record of the graph.
        outcome: Where the walk along the chain ended.
        asked_by_name: Whether the user wrote the chain.

    Attributes:
        request: As above.
        contenders: The chain; where candidates were measured, those that may serve, best first.
        report: The current record of the graph.
        floor: The callable that answers where no engine does.
    """

    def __init__(
        self,
        *,
        request: GraphRequest,
        contenders: Sequence[Contender],
        shared: SharedPasses,
        policy: Policy,
        early: tuple[PassRecord, ...],
        report: CompileReport,
        outcome: Outcome,
        asked_by_name: bool,
    ) -> None:
        self.request = _without_tensors(request)
        self.contenders = contenders
        self.report = report
        self._shared = shared
        self._policy = policy
        self._early = early
        self._asked_by_name = asked_by_name
        self._tracked = _open_to_writes(request, contenders)
        self._apart = cannot_undo(request)
        self._collective = collectives.meets_other_ranks(request.gm)
        self._contest = select.Contest.of(policy)
        self._quarantined: dict[int, _Quarantine] = {}
        self._unpublished: deque[CompileReport] = deque()
        self._unheard: list[tuple[int, CompileReport, bool]] = []
        self._publishing = forks.lock()
        self._answering: Callable[..., Any] | None = None
        self._reverting: Attempt | None = None
        self._bounds_by_key: dict[str, Bounds | None] = {}
        self.floor = self._floor_of(outcome)
        attempts = outcome.attempts
        if outcome.ranking is not None:
            self.contenders = [contenders[place] for place in outcome.ranking]
            attempts = tuple(attempts[place] for place in outcome.ranking)
        self._arrive(0, attempts)
        self._bound(outcome)

    def _floor_of(self, outcome: Outcome) -> Callable[..., Any]:
        """What serves already, if that is the floor; else it is made now, or when it is needed."""
        if outcome.chosen == FLOOR:
            return _torch.breaks.undisabled(outcome.compiled)
        return self._answer if self._shared.late else eager_forward(self.request.gm)

    def rescue(self) -> roles.Rescue | None:
        """What the guard does when the engine raises; ``None`` where it lets the error through."""
        raises = self._policy.on_runtime_error == "raise" or self._policy.strict
        serves = self.report.chosen != FLOOR or self._quarantined
        if raises or not serves:
            return None
        tracked, blind = self._tracked
        held = tuple(writes.written_attributes(self.request.gm))
        return roles.Rescue(
            floor=self.floor,
            blame=self.blame,
            successor=self.successor,
            retry_at=self.retry_at,
            retry=self.retry,
            tracked=tracked,
            held=held,
            blind=blind,
            collective=self._collective,
            reverted=self.reverted,
            publish=self.publish,
        )

    def sampler(self) -> Sampler | None:
        """What compares every N-th call, where the policy asks for that."""
        serves = self.report.chosen != FLOOR or self._quarantined
        if self._policy.verify != "sample" or not serves or self._collective:
            return None
        return Sampler(
            every=self._policy.sample_every,
            floor=self.floor,
            exact=self._exact,
            request=self.request_for,
            bounds=self._bounds,
            apart=self._apart,
            runtime=self.report.runtime,
        )

    def _exact(self, args: Sequence[Any], request: GraphRequest) -> Values:
        """What the floor computes in float64 for the inputs of a call."""
        if not self._shared.late:
            return verify.exact(args, request, self._shared)
        with _torch.compiles.recaptured(self.request.gm, args):
            return verify.exact(args, request, self._shared)

    def _bounds(self) -> Bounds:
        """The bounds of the engine that serves now; the policy's where that is the floor."""
        if self._serving == len(self.contenders):
            return bounds_of(self._policy)
        own = self._bounds_by_key.get(self.contenders[self._serving].key)
        return own or bounds_of(self._policy)

    def _answer(self, *args: Any) -> Any:
        """The floor where passes run on AOTAutograd's graphs: compiled when it is first needed."""
        if self._answering is None:
            with _torch.compiles.recaptured(self.request.gm, args):
                self._answering, _ = make_floor(self.request_for(args), self._shared)
        return self._answering(*args)

    def blame(self, error: BaseException, what: str) -> None:
        """Record that the engine failed, and put it into quarantine for this graph.

        Args:
            error: What it raised, or the refusal of a comparison that found it wrong.
            what: Who raised it, for the message: ``"raised"``, ``"its backward raised"``.
        """
        attempts = list(self.report.attempts)
        place = max(i for i, attempt in enumerate(attempts) if attempt.accepted)
        engine = attempts[place]
        at = f"at call {self.report.runtime.calls}: {first_line(text_of(error))}"
        if isinstance(error, Refusal):  # it answered, and a comparison found it wrong
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

    def successor(self, args: Sequence[Any]) -> roles.Engine:
        """The next candidate that is accepted, or the floor, compiled for these inputs."""
        first = self._serving + 1
        outcome, engine = self.walk(args, self.contenders[first:])
        self._arrive(first, outcome.attempts)
        self._bound(outcome)
        self._record((*self.report.attempts, *outcome.attempts), outcome.chosen, outcome)
        return roles.Engine(self.floor) if outcome.chosen == FLOOR else engine

    def retry_at(self) -> int | None:
        """The next call before which an engine that the chain prefers is tried again."""
        return min((each.until for each in self._preferred().values()), default=None)

    def retry(self, args: Sequence[Any]) -> roles.Engine | None:
        """The first engine in quarantine whose time has come and that is accepted.

        The wait of those that are not accepted doubles. Where the policy wants the fastest, the
        engine is measured against the floor.
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
                self._bound(outcome)
                self._record(attempts, outcome.chosen, outcome)
                return engine
            self._wait(place, calls - 1)  # this one is made by another
            self._record(attempts, self.report.chosen)
        return None

    def overtaken(self, outcome: Outcome, first: int) -> tuple[roles.Engine | None, bool]:
        """Record the result of the background contest, and reduce the chain to who may serve.

        Args:
            outcome: Of the contest; its attempts and its ranking are by place in the chain.
            first: The place of the engine that has served so far.

        Returns:
            The engine that takes over, ``None`` where the same one stays; and whether the one that
            is replaced may serve again if the new one fails.
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
        if not stays:
            self._bound(outcome)
        attempts = (*outcome.attempts, *since)
        self._record(attempts, outcome.chosen, None if stays else outcome, alongside=True)
        return None if stays else roles.Engine(outcome.compiled), may_return

    def reverted(self) -> None:
        """Record that the engine which had been replaced serves again."""
        self._serving += 1
        attempt = self._reverting
        assert attempt is not None
        self._record((*self.report.attempts, attempt), attempt.backend)

    def tell(self, timing: str) -> None:
        """Record why the background contest came to nothing."""
        attempts = [
            dataclasses.replace(each, engine=each.engine | {"timing": timing})
            if "timing" in each.engine
            else each
            for each in self.report.attempts
        ]
        self._record(tuple(attempts), self.report.chosen, alongside=True)

    def floor_in_time(self, args: Sequence[Any]) -> choice.Made:
        """The floor and its passes; compiled now, for these inputs, if it has to be compiled."""
        if not self._shared.late:
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
    ) -> tuple[Outcome, roles.Engine]:
        """Try candidates after Dynamo's compile is over.

        Args:
            args: The inputs to build for.
            contenders: The candidates.
            contest: How the fastest is found; ``None`` takes the first that is accepted.
            alongside: Whether the program runs meanwhile.
        """
        request = dataclasses.replace(self.request_for(args), alongside=alongside)
        with _torch.compiles.recaptured(request.gm, args), backward.watched() as backwards:
            outcome = chain.walk(
                request, contenders, self._shared, contest, strict=False, at_run_time=True
            )
        return outcome, roles.Engine(outcome.compiled, backwards)

    def _arrive(self, first: int, attempts: Sequence[Attempt]) -> None:
        """Note the place in the chain of the engine that serves; the floor's is behind its end."""
        accepted = (place for place, each in enumerate(attempts, first) if each.accepted)
        self._serving = next(accepted, len(self.contenders))
        for place, attempt in enumerate(attempts, first):
            if attempt.reason is Reason.QUARANTINED and place not in self._quarantined:
                self._wait(place, self.report.runtime.calls)

    def _bound(self, outcome: Outcome) -> None:
        """Note how far the engine may be off that serves from now on."""
        if self._serving < len(self.contenders):
            self._bounds_by_key[self.contenders[self._serving].key] = outcome.bounds

    def _preferred(self) -> dict[int, _Quarantine]:
        """The engines in quarantine that the chain has before the one that serves, in order."""
        return {p: each for p, each in sorted(self._quarantined.items()) if p < self._serving}

    def _wait(self, place: int, since: int) -> None:
        """Put an engine into quarantine from this call on, for twice as long as the last time."""
        engine = self.contenders[place]
        session.current().quarantine(self.request.graph_key, engine.key, engine.candidate.backend)
        if self._policy.retry_after is None:
            return
        before = self._quarantined.get(place)
        calls = 2 * before.calls if before else self._policy.retry_after
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
        passes = (*self._early, *outcome.passes) if outcome else self.report.passes
        changed = dataclasses.replace(self.report, attempts=attempts, chosen=chosen, passes=passes)
        session.current().replace(self.report, changed)
        self.report = changed
        self._unpublished.append(changed)
        self._unheard.append((threading.get_ident(), changed, alongside))

    def publish(self) -> None:
        """Give the records of the changes to the sinks, and warn of those that this thread made.

        A sink takes its time and may call the graph: no change of engines is under way meanwhile.

        Raises:
            FallbackWarning: the user turned it into an error.
        """
        here = session.current()
        with self._publishing:
            while self._unpublished:
                here.sinks.emit(self._unpublished.popleft(), first=False)
        for mine in [each for each in self._unheard if each[0] == threading.get_ident()]:
            self._unheard.remove(mine)
            _, changed, alongside = mine
            # In the background a warning that is an error reaches nobody; the log has it as well.
            with contextlib.suppress(FallbackWarning) if alongside else contextlib.nullcontext():
                notices.warn_of_fallbacks(changed, here.warned, asked_by_name=self._asked_by_name)


def _open_to_writes(
    request: GraphRequest, contenders: Sequence[Contender]
) -> tuple[tuple[int, ...], bool]:
    """Inputs that an engine of the chain may write to, and whether some cannot be watched."""
    engines = (each.backend for each in contenders)
    trusted = all(e.writes_as_the_graph or e.may_return_original for e in engines)
    if trusted and not writes.may_write(request.gm) and writes.is_known(request.gm):
        return (), False
    return writes.tracked_inputs(request, weights=not trusted)


def _without_tensors(request: GraphRequest) -> GraphRequest:
    """The request with no example input but the symbols: the first call's tensors are let go."""
    symbols = tuple(
        value if isinstance(value, torch.SymInt | torch.SymFloat) else None
        for value in request.example_inputs
    )
    return dataclasses.replace(request, example_inputs=symbols)
