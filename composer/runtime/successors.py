"""Builds the candidates of a graph after its compile, for the served graph, and has them recorded.

The graph, its policy and its chain are kept for this; the first call's inputs are not. Only
:mod:`composer.runtime.served` knows which candidate serves and which ones are in quarantine.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from composer import _torch, session
from composer.chain import select, verify, walk
from composer.chain.candidates import ChainEntry
from composer.chain.eager_fallback import EagerFallback
from composer.chain.sandbox import Undecided
from composer.chain.select import remembered
from composer.chain.select.choice import Tried
from composer.chain.select.decision import Decision
from composer.errors import Refusal, first_line, text_of
from composer.graphs import capture, collectives, writes
from composer.graphs.comparison import Values
from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.quarantine import Quarantined
from composer.knowledge.verdict import deserves_verdict
from composer.policy.resolution import Resolved
from composer.records import (
    EAGER,
    Attempt,
    GraphRequest,
    Outcome,
    Reason,
    Runtime,
    Status,
)
from composer.runtime import background
from composer.runtime.background import Tell
from composer.runtime.backward import Backwards, watched
from composer.runtime.graph_record import Attempts, GraphRecord, Serving
from composer.runtime.sampling import Sampler, cannot_undo
from composer.runtime.served import Built, Engine, ServedGraph
from composer.runtime.versions import Versions


class Successors:
    """One graph's chain after the compile.

    Where ranges of sizes have engines of their own, each of these has such an object
    (:meth:`sibling`). They share the chain and the record.

    Args:
        request: The graph after the passes of the stages ``torch`` and ``aten``. Of its example
            inputs, only the symbols are kept.
        resolved: The policy in force for the graph, with its candidates and passes.
        eager: The eager fallback.
        record: The record of the graph.

    Attributes:
        record: The record of the graph.
        fallback: The eager fallback.
        in_background: True if the policy asks for choices in the background.
        recovers: True if another engine follows one that fails; else errors reach the caller.
        retry_after: Calls that an engine's first quarantine lasts; ``None`` for ever.
        collective: True if the graph has collectives. Then a call must not be repeated, because
            the other ranks would not repeat theirs.
    """

    def __init__(
        self,
        *,
        request: GraphRequest,
        resolved: Resolved,
        eager: EagerFallback,
        record: GraphRecord,
    ) -> None:
        self.request = capture.without_tensors(request)
        self.entries = resolved.entries
        self.record = record
        self._serving = record.servings[0]
        self._accepted: Attempt | None = None
        self._resolved = resolved
        self.eager = eager
        self.fallback = eager.run
        self._tracked = _writable_inputs(request, resolved.entries)
        self._apart = cannot_undo(request)
        policy = resolved.policy
        self.recovers = not (policy.on_runtime_error.action == "raise" or policy.strict)
        self.retry_after = policy.on_runtime_error.retry_after
        self.in_background = policy.select.background
        self.collective = collectives.meets_other_ranks(request.gm)
        self.benchmark = select.Benchmark.of(policy, resolved.cache)
        self._measures_anew = background.measures_anew(resolved)

    @property
    def runtime(self) -> Runtime:
        """What the calls of the graph have come to."""
        return self.record.report.runtime

    def served(self, outcome: Outcome, backwards: Backwards, *, selects: bool) -> ServedGraph:
        """Return the object that answers the graph's calls.

        Args:
            outcome: The result of trying the chain at the compile.
            backwards: The backwards that were compiled with it.
            selects: True if a background selection begins with the second call.
        """
        if outcome.chosen == EAGER:
            self.eager.adopt(outcome.compiled)
        self.fallback = self.eager.run
        places = tuple(range(len(self.entries)))
        order = places if outcome.ranking is None else outcome.ranking
        return self._served(self._built(places, outcome, backwards, order), selects=selects)

    def _served(self, built: Built, *, selects: bool = False) -> ServedGraph:
        is_retried = bool(built.skipped) and self.retry_after is not None
        may_serve = built.engine is not None or is_retried or selects or built.is_provisional
        samples = self._resolved.policy.verify.when == "sample" and not self.collective
        sampler = self._sampler() if may_serve and samples else None
        tracked, is_blind = self._tracked
        held = tuple(writes.written_attributes(self.request.gm))
        detects = may_serve and self.recovers and not is_blind
        versions = Versions(tracked, held, blind=not detects)
        return ServedGraph(built, self, self.runtime, versions, sampler, selects=selects)

    def begin_selection(
        self, args: Sequence[Any], is_wanted: Callable[[], bool], tell: Tell
    ) -> None:
        """Begin the selection in the background (:func:`composer.runtime.background.begin`)."""
        chain = self.entries, self.eager.shared, self.benchmark
        background.begin(self.request, chain, args, is_wanted, tell, self.runtime)

    def _sampler(self) -> Sampler:
        return Sampler(
            every=self._resolved.policy.verify.every,
            fallback=self.fallback,
            exact=self._exact,
            request=self.request_for,
            apart=self._apart,
            runtime=self.runtime,
        )

    def _built(
        self,
        places: Sequence[int],
        outcome: Outcome,
        backwards: Backwards | None,
        order: tuple[int, ...] = (),
        serving: Engine | None = None,
    ) -> Built:
        """Return an outcome for the served graph; it may cover only the first of the places."""
        attempts = dict(zip(places, outcome.attempts, strict=False))
        skipped = tuple(p for p, a in attempts.items() if a.reason is Reason.QUARANTINED)
        provisional = self._measures_anew and Decision(outcome.attempts, ()).under_load
        if outcome.chosen == EAGER:
            return Built(None, order, skipped, provisional)
        place, self._accepted = next(pair for pair in attempts.items() if pair[1].accepted)
        if serving is not None and outcome.compiled is serving.compiled:
            return Built(serving, order, skipped, provisional)
        bounds = outcome.bounds or self._resolved.policy.verify.bounds
        run = _torch.breaks.undisabled(outcome.compiled)
        return Built(Engine(run, place, bounds, backwards), order, skipped, provisional)

    def _exact(self, args: Sequence[Any], request: GraphRequest) -> Values:
        """Return the eager fallback's values in float64 for the inputs of a call."""
        late, gm = self._resolved.shared.late, self.request.gm
        with _torch.compiles.recaptured(gm, args) if late else contextlib.nullcontext():
            return verify.exact(args, request, self._resolved.shared)

    def compiling(self) -> AbstractContextManager[object]:
        """Hold torch's lock of compiles."""
        return _torch.compiles.compiling()

    def quarantine(self, place: int) -> None:
        """Exclude a candidate for this graph in the whole process."""
        entry = self.entries[place]
        quarantined = Quarantined(in_chain=entry.candidate.backend)
        fingerprint = Fingerprint(self.request, (entry.parts,))
        session.current().knowledge.learn(quarantined, fingerprint, entry.cache)

    def failed(self, error: BaseException, what: str) -> None:
        """Record that the engine failed; if ``error`` is a Refusal, its numbers were wrong."""
        engine = self._accepted
        assert engine is not None
        at = f"at call {self.runtime.calls}: {first_line(text_of(error))}"
        if isinstance(error, Refusal):  # it answered, and a comparison found it wrong
            ended = dataclasses.replace(
                engine, status=error.status, reason=error.reason, message=at
            )
        else:
            reason = Reason.RAISED_AT_RUNTIME
            ended = engine.raised(Status.FAILED, reason, f"{what} {at}", error)

        def with_failure(attempts: Attempts) -> Iterator[Attempt]:
            return (ended if each is engine else each for each in attempts)

        self.record.change(self._serving, with_failure, EAGER)

    def build(self, places: Sequence[int], args: Sequence[Any]) -> Built:
        """Build the candidates at these places in turn until one is accepted, and record them."""
        outcome, backwards = self._walk(args, [self.entries[place] for place in places])
        self._add(outcome)
        return self._built(places, outcome, backwards)

    def rebuild(self, place: int, args: Sequence[Any]) -> Engine | None:
        """Build a candidate from quarantine again; ``None`` if it is not accepted.

        If the policy asks for the fastest engine, it is also timed against the eager fallback.
        """
        entry = self.entries[place]
        fingerprint = Fingerprint(self.request, (entry.parts,))
        session.current().knowledge.forget(Quarantined, fingerprint)
        outcome, backwards = self._walk(args, (entry,), self.benchmark)
        if not outcome.attempts[0].accepted:
            self.note(outcome.attempts)
            return None
        self._add(outcome)
        return self._built((place,), outcome, backwards).engine

    def follow(
        self, decision: Decision | Undecided, args: Sequence[Any], serving: Engine | None
    ) -> Built:
        """Build what the background has chosen, and record it.

        Args:
            decision: The decision; or why there is none. Then the first that is accepted here
                serves.
            args: The inputs to build for.
            serving: The engine that serves, which is not built again; ``None`` for eager.
        """
        places = tuple(range(len(self.entries)))
        with self._compiling(args) as (request, backwards):
            if isinstance(decision, Undecided):
                outcome = self._first(request, decision)
            else:
                chain = self.entries, self.eager, decision, self.benchmark
                outcome = walk.follow(request, *chain, self._already_built(serving))
        if self._serving is self.record.servings[0]:
            made = outcome.attempts
            self.record.change(self._serving, lambda _: made, outcome.chosen, outcome.passes)
        else:
            self._add(outcome)
        order = places if outcome.ranking is None else outcome.ranking
        return self._built(places, outcome, backwards, order, serving)

    def _already_built(self, serving: Engine | None) -> dict[int, Tried]:
        """Return the engine that serves, by its place, as it was accepted."""
        if serving is None:
            return {}
        assert self._accepted is not None
        compiled, passes = serving.compiled, self.record.late_passes
        accepted = Tried(self._accepted, compiled, passes=passes, bounds=serving.bounds)
        return {serving.place: accepted}

    def decide(self, args: Sequence[Any]) -> Decision:
        """Find the fastest candidate for the inputs of a call: in a sandbox, or in this process."""
        assert self.benchmark is not None
        with self._compiling(args) as (request, _):
            decided = walk.decide(request, self.entries, self.eager, self.benchmark)
            if isinstance(decided, Decision):
                return decided
            chain = self.entries, self.eager, self.benchmark
            made = walk.at_run_time(request, *chain, decided.refused)
        return Decision(
            made.attempts, made.ranking or (), lasts=deserves_verdict(made), in_sandbox=False
        )

    def sibling(self, decision: Decision, args: Sequence[Any]) -> tuple[ServedGraph, Successors]:
        """Return what serves further sizes of the graph by an engine of its own.

        Args:
            decision: The decision for these sizes. The best of it that is accepted is built.
            args: The inputs to build for.
        """
        other = copy.copy(self)
        other._serving = Serving(EAGER)
        self.record.servings.append(other._serving)
        try:
            return other._served(other.follow(decision, args, None)), other
        except BaseException:
            self.record.servings.remove(other._serving)
            raise

    def serves_at(self, size: int) -> None:
        """Record a size at which the engine that serves is the fastest."""
        self.record.serves_at(self._serving, size)

    def note(self, attempts: Attempts) -> None:
        """Record attempts after which the same engine serves."""
        self.record.add(self._serving, attempts, self._serving.chosen)

    def remember(self, decision: Decision) -> None:
        """Remember a decision that was made for a size of its own."""
        assert self.benchmark is not None
        if decision.lasts:
            whole = remembered.fingerprint_of(self.request, self.entries)
            remembered.keep(whole, self.benchmark, decision.unbuilt(self.fallback))

    def decisions(self) -> list[Decision]:
        """Return the decisions that are remembered for the sizes of the graph."""
        assert self.benchmark is not None
        whole = remembered.fingerprint_of(self.request, self.entries)
        return remembered.decisions(whole, self.benchmark, self.entries)

    def _first(self, request: GraphRequest, undecided: Undecided) -> Outcome:
        """Walk the chain to the first that is accepted, and note why that one serves."""
        chain = self.entries, self.eager
        outcome = walk.at_run_time(request, *chain, refused=undecided.refused)
        told = f"no: {undecided.why}"
        ends = (
            end._replace(attempt=end.attempt.timed(told)) if end.attempt.accepted else end
            for end in outcome.ends
        )
        return dataclasses.replace(outcome, ends=tuple(ends))

    def _walk(
        self,
        args: Sequence[Any],
        entries: Sequence[ChainEntry],
        benchmark: select.Benchmark | None = None,
    ) -> tuple[Outcome, Backwards]:
        """Try candidates for the inputs of a call; return the outcome and their backwards."""
        with self._compiling(args) as (request, backwards):
            outcome = walk.at_run_time(request, entries, self.eager, benchmark)
        return outcome, backwards

    @contextlib.contextmanager
    def _compiling(self, args: Sequence[Any]) -> Iterator[tuple[GraphRequest, Backwards]]:
        """Compile after Dynamo's compile is over; yield the request, and what guards backwards."""
        request = self.request_for(args)
        with _torch.compiles.recaptured(request.gm, args), watched() as backwards:
            yield request, backwards

    def request_for(self, args: Sequence[Any]) -> GraphRequest:
        """Return the graph's request with the inputs of a call."""
        return capture.for_call(self.request, args)

    def publish(self) -> None:
        """Publish the record (:meth:`GraphRecord.publish`)."""
        self.record.publish()

    def _add(self, outcome: Outcome) -> None:
        self.record.add(self._serving, outcome.attempts, outcome.chosen, outcome.passes)


def _writable_inputs(
    request: GraphRequest, entries: Sequence[ChainEntry]
) -> tuple[tuple[int, ...], bool]:
    """Return the inputs that an engine may write to, and True if some writes cannot be detected."""
    engines = (each.backend for each in entries)
    trusted = all(e.writes_as_the_graph or e.may_return_original for e in engines)
    writes_nothing = writes.is_known(request.gm) and not writes.may_write(request.gm)
    if trusted and writes_nothing:
        return (), False
    return writes.tracked_inputs(request, weights=not trusted)
