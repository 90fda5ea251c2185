"""What follows when the engine that serves a graph raises: the record of it, and the next engine.

The graph, its policy and what is left of its chain are kept for that; no tensor is.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from composer import _torch, chain, collectives, guard, session, writes
from composer.errors import Refusal, text_of
from composer.passes.resolve import SharedPasses
from composer.policy import Policy
from composer.records import (
    Attempt,
    CompileReport,
    GraphRequest,
    Outcome,
    PassRecord,
    Reason,
    Status,
    first_line,
)
from composer.sampling import Sampler, cannot_undo
from composer.telemetry import notices


@dataclass
class Succession:
    """The rest of a chain, for when the engine chosen fails at run time.

    Attributes:
        request: The graph, as the passes of the stages ``torch`` and ``aten`` left it.
        rest: The contenders behind the one that serves.
        shared: The passes of the later stages.
        policy: What the user wants.
        early: Records of the passes that ran before every candidate.
        report: The record of this graph, as it stands.
        asked_by_name: Whether the user wrote the chain.
    """

    request: GraphRequest
    rest: Sequence[chain.Contender]
    shared: SharedPasses
    policy: Policy
    early: tuple[PassRecord, ...]
    report: CompileReport
    asked_by_name: bool
    _answering: Callable[..., Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Let go of the tensors."""
        self._tracked = writes.tracked_inputs(self.request)
        self._apart = cannot_undo(self.request)
        self._collective = collectives.meets_other_ranks(self.request.gm)
        late = bool(self.shared.late)
        self.floor = self._answer if late else _torch.settled_forward(self.request.gm)
        symbols = tuple(
            value if isinstance(value, torch.SymInt | torch.SymFloat) else None
            for value in self.request.example_inputs
        )
        self.request = dataclasses.replace(self.request, example_inputs=symbols)

    def rescue(self) -> guard.Rescue | None:
        """What the guard does when the engine raises; ``None`` where it lets the error through."""
        raises = self.policy.on_runtime_error == "raise" or self.policy.strict
        if raises or self.report.chosen == chain.FLOOR:
            return None
        tracked, blind = self._tracked
        held = tuple(writes.written_attributes(self.request.gm))
        return guard.Rescue(
            self.floor, self.blame, self.successor, tracked, held, blind, self._collective
        )

    def sampler(self) -> Sampler | None:
        """What compares every N-th call, where the policy asks for that."""
        if self.policy.verify != "sample" or self.report.chosen == chain.FLOOR:
            return None
        if self._collective:
            return None
        return Sampler(
            self.policy.sample_every,
            self.floor,
            self._request_for,
            chain.bounds_of(self.policy),
            self._apart,
            self.report.runtime,
        )

    def _answer(self, *args: Any) -> Any:
        """The floor where passes run within AOTAutograd's step: made when it is first needed."""
        if self._answering is None:
            with _torch.recaptured(self.request.gm, args):
                self._answering = chain.floor(self._request_for(args), self.shared)
        return self._answering(*args)

    def blame(self, error: Exception) -> None:
        """Record that the engine failed, and let this graph have it no more in this process."""
        *earlier, engine = self.report.attempts
        at = f"at call {self.report.runtime.calls}: {first_line(text_of(error))}"
        if isinstance(error, Refusal):  # it answered, and was found to be wrong
            failed = dataclasses.replace(
                engine, status=error.status, reason=error.reason, message=at
            )
        else:
            failed = dataclasses.replace(
                engine,
                status=Status.FAILED,
                reason=Reason.RAISED_AT_RUNTIME,
                message=f"raised {at}",
                error_type=type(error).__name__,
                traceback="".join(traceback.format_exception(error)),
            )
        session.current().quarantine(self.request.graph_key, failed.backend)
        self._record((*earlier, failed), chain.FLOOR)

    def successor(self, args: Sequence[Any]) -> Callable[..., Any]:
        """The next candidate that is accepted, or the floor, compiled for these inputs."""
        request = self._request_for(args)
        with _torch.recaptured(request.gm, args):
            outcome = chain.walk(request, self.rest, self.shared, strict=False)
        self.rest = self.rest[len(outcome.attempts) :]
        attempts = (*self.report.attempts, *outcome.attempts)
        self._record(attempts, outcome.chosen, outcome)
        return self.floor if outcome.chosen == chain.FLOOR else outcome.compiled

    def _request_for(self, args: Sequence[Any]) -> GraphRequest:
        inputs = zip(self.request.example_inputs, args, strict=True)
        given = tuple(arg if symbol is None else symbol for symbol, arg in inputs)
        return dataclasses.replace(self.request, example_inputs=given)

    def _record(
        self, attempts: tuple[Attempt, ...], chosen: str, outcome: Outcome | None = None
    ) -> None:
        passes = (*self.early, *outcome.passes) if outcome else self.report.passes
        changed = dataclasses.replace(self.report, attempts=attempts, chosen=chosen, passes=passes)
        here = session.current()
        here.replace(self.report, changed)
        self.report = changed
        here.sinks.emit(changed, first=False)
        notices.warn_of_fallbacks(changed, here.warned, asked_by_name=self.asked_by_name)
