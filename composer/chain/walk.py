"""The fallback chain: each candidate on its own copy of the graph, until one is accepted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from composer import session
from composer.chain import sandbox, select, selftest
from composer.chain.attempt import run_once, try_candidate
from composer.chain.candidates import ChainEntry
from composer.chain.eager_fallback import EagerFallback
from composer.chain.repro import FAULTS
from composer.chain.select import choice, remembered
from composer.chain.select.decision import Decision
from composer.errors import CandidateError, ChainExhausted
from composer.graphs import writes
from composer.knowledge.verdict import Verdict
from composer.passes.within_aotautograd import LatePasses
from composer.records import Attempt, GraphRequest, Outcome, Status
from composer.system.memory import free_memory

E = TypeVar("E", bound=BaseException)


Step = Callable[[int | None, Sequence[Attempt]], None]
"""Called in a sandbox before each candidate and build, with its place and the attempts so far."""


def walk(
    request: GraphRequest,
    entries: Sequence[ChainEntry],
    eager: EagerFallback,
    benchmark: select.Benchmark | None = None,
    *,
    strict: bool = False,
    among_ranks: bool = False,
    in_sandbox: Step | None = None,
) -> Outcome:
    """Try one candidate after the other, and choose which one serves the graph.

    Nobody is asked to serve a graph that computes nothing: the eager fallback does, in silence.
    Without a ``benchmark``, the first accepted candidate serves; with one, the fastest of the
    accepted ones. The eager fallback serves if no candidate does. If the fastest is known from
    earlier, only that candidate is tried: no other is built, probed or imported. Else a sandbox
    finds it out, and it alone is built here. It is proven and verified like any other.

    Args:
        request: The graph, as the passes of the stages ``torch`` and ``aten`` left it.
        entries: The chain.
        eager: The eager fallback. Every candidate runs the same passes of the later stages.
        benchmark: How to find the fastest; ``None`` takes the first that is accepted.
        strict: End the walk at the first candidate that is not accepted.
        among_ranks: True if other ranks of ``torch.distributed`` have to take the same engine.
        in_sandbox: Where this process is a sandbox, a function to call before each candidate and
            each build with its place and the attempts so far, and with ``None`` before measuring.

    Raises:
        PassError: a pass failed, and the policy says ``on_pass_error = "raise"``.
    """
    trying = _Trying(request, entries, eager, among_ranks, in_sandbox=in_sandbox)

    # 0. There is nothing to gain from an engine where nothing is computed.
    if writes.computes_nothing(request.gm):
        alone = trying.fallback("the graph computes nothing")
        return choice.outcome_of([alone], alone)

    # 1. The fastest is known from earlier, or a sandbox finds it out. It is built here alone.
    whole = remembered.fingerprint_of(request, entries)
    chooses = in_sandbox is None and trying.can_measure(benchmark)
    why_here = ""
    if benchmark is not None and chooses:
        decision = remembered.decision(whole, benchmark, entries)
        if decision is not None:
            outcome = trying.follow(decision, decision.ranking[:1])
            if outcome is not None:
                return outcome
            # The winner of then is refused now, so all are measured anew.
            session.current().knowledge.forget(Verdict, whole)
        decided = decide(request, entries, eager, benchmark, strict=strict)
        if isinstance(decided, Decision):
            outcome = trying.follow(decided, decided.ranking) or trying.none_of(decided)
            if decided.lasts:
                remembered.keep(whole, benchmark, outcome)
            return outcome
        why_here = decided.why
        trying.refused |= decided.refused

    # 2. They are tried here, one after the other.
    outcome = trying.in_order(benchmark, strict=strict, why_here=why_here)
    if benchmark is not None and chooses:
        remembered.keep(whole, benchmark, outcome)
    return outcome


def at_run_time(
    request: GraphRequest,
    entries: Sequence[ChainEntry],
    eager: EagerFallback,
    benchmark: select.Benchmark | None = None,
    refused: Mapping[int, choice.Tried] | None = None,
) -> Outcome:
    """Try one candidate after the other when Dynamo's compile is over.

    Control-flow exceptions of Dynamo fail a candidate then, as any other error does.

    Args:
        request: The graph, with the inputs of a call.
        entries: The chain, or a part of it.
        eager: The eager fallback.
        benchmark: How to find the fastest; ``None`` takes the first that is accepted.
        refused: Candidates that are not tried again, by their places, as they were refused.
    """
    trying = _Trying(request, entries, eager, at_run_time=True, refused=dict(refused or {}))
    return trying.in_order(benchmark)


def decide(
    request: GraphRequest,
    entries: Sequence[ChainEntry],
    eager: EagerFallback,
    benchmark: select.Benchmark,
    *,
    strict: bool = False,
) -> Decision | sandbox.Undecided:
    """Have a sandbox decide; return why it does not, empty if all engines are torch's own."""
    if all(each.is_torchs for each in entries):
        return sandbox.Undecided("")
    return sandbox.decide(request, entries, eager.shared, benchmark, strict=strict)


def follow(
    request: GraphRequest,
    entries: Sequence[ChainEntry],
    eager: EagerFallback,
    decision: Decision,
    benchmark: select.Benchmark | None,
    built: Mapping[int, choice.Tried] = types.MappingProxyType({}),
) -> Outcome:
    """Build the best candidate of a decision that is accepted here, after Dynamo's compile.

    Args:
        request: The graph.
        entries: The chain.
        eager: The eager fallback, which serves if no candidate is accepted.
        decision: What a sandbox has found.
        benchmark: How it found the fastest; ``None`` for the first that was accepted.
        built: Candidates that need not be built again, by their places: the one that serves.
    """
    whole = remembered.fingerprint_of(request, entries)
    trying = _Trying(request, entries, eager, at_run_time=True, built=built)
    outcome = trying.follow(decision, decision.ranking) or trying.none_of(decision)
    if benchmark is not None and decision.lasts:
        remembered.keep(whole, benchmark, outcome)
    return outcome


@dataclass
class _Trying:
    """Tries the candidates of a chain; the attributes are arguments of :func:`walk`.

    Attributes:
        made: Results that engines share.
        refused: Candidates that are not tried again, by their places.
        built: Candidates that need not be built again, by their places.
    """

    request: GraphRequest
    entries: Sequence[ChainEntry]
    eager: EagerFallback
    among_ranks: bool = False
    at_run_time: bool = False
    in_sandbox: Step | None = None
    made: dict[str, object] = field(default_factory=dict)
    refused: dict[int, choice.Tried] = field(default_factory=dict)
    built: Mapping[int, choice.Tried] = field(default_factory=dict)

    def fallback(self, message: str = "") -> choice.Tried:
        """Return the eager fallback."""
        return choice.fallback_of(*self.eager.made(self.request), message)

    def at(
        self,
        place: int,
        *,
        in_sandbox: bool = False,
        begins: Callable[[], object] = lambda: None,
    ) -> choice.Tried:
        """Try the candidate at a place of the chain.

        Args:
            place: The place.
            in_sandbox: True if a sandbox has run it on this graph.
            begins: Called before each build.
        """
        entry = self.entries[place]
        if in_sandbox:
            entry = dataclasses.replace(entry, in_sandbox=True)
        passes = LatePasses(self.eager.shared, entry.candidate.name)
        with session.current().progress.step(self.request, entry.candidate.name):
            tried = try_candidate(
                self.request,
                entry,
                passes,
                made=self.made,
                require_working=selftest.require,
                among_ranks=self.among_ranks,
                at_run_time=self.at_run_time,
                begins=begins,
            )
        return dataclasses.replace(tried, passes=passes.records)

    def can_measure(self, benchmark: select.Benchmark | None) -> bool:
        """Return True if the candidates are to be measured, and can be."""
        return benchmark is not None and not self.obstacle()

    def obstacle(self) -> str:
        """Return why the candidates cannot be measured; empty if they can."""
        return select.obstacle(self.request, among_ranks=self.among_ranks)

    def in_order(
        self, benchmark: select.Benchmark | None, *, strict: bool = False, why_here: str = ""
    ) -> Outcome:
        """Try the candidates in the order of the chain, and choose which one serves.

        Args:
            benchmark: As for :func:`walk`.
            strict: As for :func:`walk`.
            why_here: Why no sandbox has tried them; empty if none was to.
        """
        obstacle = "" if benchmark is None else self.obstacle()
        if obstacle:  # the first accepted candidate serves
            benchmark = None
        made: list[choice.Tried] = []
        for place in range(len(self.entries)):
            tried = self.in_turn(place, made)
            if why_here:
                tried = tried.with_fact("measured_here", why_here)
            made.append(tried)
            is_accepted = tried.compiled is not None
            if is_accepted and benchmark is None:
                return choice.first(made, tried, obstacle)
            if is_accepted and tried.is_fallback:
                break
            if strict and _is_refused(tried.attempt):
                break
        if benchmark is None:
            return choice.outcome_of(made, self.fallback())
        if self.in_sandbox is not None:
            self.in_sandbox(None, [each.attempt for each in made])
        outcome = choice.fastest(made, self.fallback, self.request, benchmark)
        free_memory()  # of those that lost
        return outcome

    def in_turn(self, place: int, before: Sequence[choice.Tried]) -> choice.Tried:
        """Try the candidate whose turn it is in the chain, unless it was just refused.

        Args:
            place: Its place.
            before: The candidates before it.
        """
        if place in self.refused:
            return self.refused[place]
        if self.in_sandbox is None:
            return self.at(place)
        step = functools.partial(self.in_sandbox, place, [each.attempt for each in before])
        step()
        return run_once(self.at(place, begins=step), self.request)

    def follow(self, decision: Decision, places: Sequence[int]) -> Outcome | None:
        """Build the candidates at these places until one is accepted; ``None`` if none is."""
        self.refused.clear()
        if not decision.ranking:
            return self.none_of(decision)
        for place in places:
            known = decision.attempts[place] if place < len(decision.attempts) else None
            in_sandbox = known is not None and decision.in_sandbox
            tried = self.built.get(place) or self.at(place, in_sandbox=in_sandbox)
            if tried.compiled is not None:
                return decision.outcome(place, tried, self.refused)
            self.refused[place] = tried
        return None

    def none_of(self, decision: Decision) -> Outcome:
        """Return the outcome of a decision where the eager fallback serves."""
        return decision.outcome(None, self.fallback(), self.refused)


def _is_refused(attempt: Attempt) -> bool:
    """Return True if a candidate was not accepted, although it should have been under ``strict``.

    A candidate that the policy skips, or takes tentatively, need not be accepted.
    """
    return not (attempt.accepted or attempt.status is Status.SKIPPED or attempt.tentative)


def objection(
    outcome: Outcome, *, strict: bool, on_exhausted: str, shows_faults: bool = False
) -> Exception | None:
    """Return the error to raise, if the user asked for an error rather than a fallback.

    It is a ``CandidateError`` under ``strict`` if a candidate was not accepted, and
    ``ChainExhausted`` under ``on_exhausted="raise"`` if none was. A candidate that was slower in a
    benchmark counts as accepted, and a tentative one need not be accepted. With ``shows_faults``,
    it is the error of the first candidate that failed.
    """
    ended = [(attempt, cause) for attempt, cause in outcome.ends if cause is not None]
    faults = FAULTS if shows_faults else ()
    for attempt, cause in ended:
        if strict and _is_refused(attempt):
            return _candidate_error(attempt, cause)
        if attempt.status in faults:
            return _as_exception(attempt, cause)
    if on_exhausted == "raise" and len(ended) == len(outcome.ends):
        return ChainExhausted(outcome.attempts, list(itertools.starmap(_as_exception, ended)))
    return None


def _as_exception(attempt: Attempt, cause: BaseException) -> Exception:
    """Return the error that ended an attempt, in a form that an ExceptionGroup can hold."""
    if not isinstance(cause, Exception):
        return _candidate_error(attempt, cause)
    return _with_lines(attempt, cause)


def _candidate_error(attempt: Attempt, cause: BaseException) -> CandidateError:
    error = CandidateError(attempt)
    error.__cause__ = _with_lines(attempt, cause)
    return error


def _with_lines(attempt: Attempt, cause: E) -> E:
    """Return the error with its traceback as a note, because its frames were released."""
    if attempt.traceback:
        cause.add_note(attempt.traceback)
    return cause
