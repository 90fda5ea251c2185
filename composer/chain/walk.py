"""The fallback chain: each candidate on its own copy of the graph, until one is accepted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeVar

from composer import session
from composer.chain import select, selftest
from composer.chain.attempt import try_candidate
from composer.chain.candidates import ChainEntry
from composer.chain.eager_fallback import EagerFallback
from composer.chain.select import choice, remembered
from composer.errors import CandidateError, ChainExhausted
from composer.graphs import writes
from composer.knowledge.facts import Known
from composer.knowledge.verdict import Verdict
from composer.passes.within_aotautograd import LatePasses
from composer.records import Attempt, GraphRequest, Outcome, Status
from composer.system.memory import free_memory

E = TypeVar("E", bound=BaseException)


def walk(
    request: GraphRequest,
    entries: Sequence[ChainEntry],
    eager: EagerFallback,
    benchmark: select.Benchmark | None = None,
    *,
    strict: bool,
    among_ranks: bool = False,
    at_run_time: bool = False,
    made: dict[str, object] | None = None,
) -> Outcome:
    """Try one candidate after the other, and choose which one serves the graph.

    Nobody is asked to serve a graph that computes nothing: the eager fallback does, in silence.
    Without a ``benchmark``, the first accepted candidate serves; with one, the fastest of the
    accepted ones. The eager fallback serves if no candidate does. If the fastest is known from
    earlier, only that candidate is tried: no other is built, probed or imported. It is proven and
    verified like any other.

    Args:
        request: The graph, as the passes of the stages ``torch`` and ``aten`` left it.
        entries: The chain.
        eager: The eager fallback. Every candidate runs the same passes of the later stages.
        benchmark: How to find the fastest; ``None`` takes the first that is accepted.
        strict: End the walk at the first candidate that is not accepted.
        among_ranks: True if other ranks of ``torch.distributed`` have to take the same engine.
        at_run_time: True if Dynamo's compile is over. Its control-flow exceptions then fail a
            candidate, as any other error does.
        made: Results that engines share between walks over the same graph.

    Raises:
        PassError: a pass failed, and the policy says ``on_pass_error = "raise"``.
    """
    made = {} if made is None else made

    def fallback() -> choice.Tried:
        return choice.fallback_of(*eager.made(request))

    # 0. There is nothing to gain from an engine where nothing is computed.
    if writes.computes_nothing(request.gm):
        alone = choice.fallback_of(*eager.made(request), "the graph computes nothing")
        return choice.outcome_of([alone], alone)

    # 1. Where nothing can be measured, the first accepted candidate serves.
    obstacle = ""
    if benchmark is not None:
        obstacle = select.obstacle(request, among_ranks=among_ranks)
    if obstacle:
        benchmark = None

    # 2. The winner of an earlier benchmark is tried first and, if it is accepted, alone.
    known: Known[Verdict] = Known()
    whole = remembered.fingerprint_of(request, entries)
    if benchmark is not None and not at_run_time:
        known = remembered.recall(whole, benchmark)
    verdict = known.fact
    if verdict is not None and verdict.winner is None:
        return remembered.outcome_of(verdict, known.source, entries, fallback())

    # 3. Try one after the other, until one can serve or all that may serve are known.
    ends: dict[int, choice.Tried] = {}
    for place in _in_order(entries, verdict):
        entry = entries[place]
        # A sandbox tries only what has not run here yet. A verdict is a fact that its winner has
        # run on this machine. After the compile, candidates are those of an earlier choice.
        if benchmark is None or verdict is not None or at_run_time:
            entry = dataclasses.replace(entry, trial=False)
        passes = LatePasses(eager.shared, entry.candidate.name)
        with session.current().progress.step(request, entry.candidate.name):
            tried = try_candidate(
                request,
                entry,
                passes,
                0 if verdict is None else verdict.candidates[place].products_in_fp32,
                made=made,
                require_working=selftest.require,
                among_ranks=among_ranks,
                at_run_time=at_run_time,
            )
        ends[place] = tried = dataclasses.replace(tried, passes=passes.records)
        is_accepted = tried.compiled is not None
        if verdict is not None and is_accepted:
            return remembered.outcome_of(verdict, known.source, entries, tried)
        if verdict is not None:
            # The winner of then is refused now, so all are measured anew.
            session.current().knowledge.forget(Verdict, whole)
            verdict = None
        if is_accepted and benchmark is None:
            return choice.first(list(ends.values()), tried, obstacle)
        if is_accepted and tried.is_fallback:
            break
        if strict and _is_refused(tried.attempt):
            break

    # 4. Measure those that were accepted, and learn the verdict; or nobody was.
    in_chain = [ends[place] for place in sorted(ends)]
    if benchmark is None:
        return choice.outcome_of(in_chain, fallback())
    outcome = choice.fastest(in_chain, fallback, request, benchmark)
    free_memory()  # of those that lost
    if not at_run_time:
        remembered.keep(whole, benchmark, outcome)
    return outcome


def _in_order(entries: Sequence[ChainEntry], verdict: Verdict | None) -> list[int]:
    """Return the places of the chain in the order to try: the remembered winner first."""
    places = list(range(len(entries)))
    if verdict is None or verdict.winner is None:
        return places
    return [verdict.winner, *(each for each in places if each != verdict.winner)]


def _is_refused(attempt: Attempt) -> bool:
    """Return True if a candidate was not accepted, although it should have been under ``strict``.

    A candidate that the policy skips, or takes tentatively, need not be accepted.
    """
    return not (attempt.accepted or attempt.status is Status.SKIPPED or attempt.tentative)


_FAULTS = (Status.FAILED, Status.REJECTED, Status.TIMED_OUT, Status.CRASHED)


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
    faults = _FAULTS if shows_faults else ()
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
