"""The fallback chain: each candidate on its own copy of the graph, until one is accepted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from composer import _torch, session
from composer.chain import ranks, select, selftest
from composer.chain.attempt import try_candidate
from composer.chain.candidates import ChainEntry
from composer.chain.eager_fallback import make_fallback
from composer.chain.select import choice, remembered, verdicts
from composer.errors import CandidateError, ChainExhausted
from composer.passes.resolve import SharedPasses
from composer.passes.within_aotautograd import LatePasses
from composer.records import Attempt, GraphRequest, Outcome, Status

E = TypeVar("E", bound=BaseException)


def walk(
    request: GraphRequest,
    entries: Sequence[ChainEntry],
    shared: SharedPasses,
    benchmark: select.Benchmark | None = None,
    *,
    strict: bool,
    agree_within: float = 0.0,
    at_run_time: bool = False,
    made: dict[str, object] | None = None,
) -> Outcome:
    """Try one candidate after the other, and choose which one serves the graph.

    Without a ``benchmark``, the first accepted candidate serves; with one, the fastest of the
    accepted ones. The eager fallback serves if no candidate does.

    Args:
        request: The graph, as the passes of the stages ``torch`` and ``aten`` left it.
        entries: The chain.
        shared: The passes of the later stages, which every candidate and the eager fallback run.
        benchmark: How to find the fastest; ``None`` takes the first that is accepted.
        strict: End the walk at the first candidate that is not accepted.
        agree_within: Seconds to wait for other ranks of ``torch.distributed``; 0 asks none.
        at_run_time: True if Dynamo's compile is over. Its control-flow exceptions then fail a
            candidate, as any other error does.
        made: Results that engines share between walks over the same graph.

    Raises:
        PassError: a pass failed, and the policy says ``on_pass_error = "raise"``.
    """
    made = {} if made is None else made
    fallback = functools.partial(make_fallback, request, shared)
    again = _torch.dynamo.is_recompile()
    with ranks.among_ranks(request.key_among_ranks, agree_within, again=again) as vote:

        def trial(place: int, in_fp32: int = 0) -> choice.Tried:
            entry = entries[place]
            passes = LatePasses(shared, entry.candidate.name)
            with session.current().progress.step(request, entry.candidate.name):
                tried = try_candidate(
                    request,
                    entry,
                    passes,
                    vote(place),
                    in_fp32,
                    made=made,
                    require_working=selftest.require,
                    at_run_time=at_run_time,
                )
            attempt = tried.attempt
            if tried.error is not None:  # an expensive failure is remembered
                attempt = entry.remember(request, attempt, tried.error)
            return dataclasses.replace(tried, attempt=attempt, passes=passes.records)

        tries = functools.partial(_try_in_turn, trial, len(entries), strict=strict)
        if benchmark is None:
            return choice.first(tries(), fallback)
        if obstacle := select.obstacle(request, among_ranks=agree_within > 0):
            return choice.first(tries(), fallback, why=obstacle)
        cache = None if at_run_time else verdict_cache(request, entries, benchmark)
        return remembered.fastest(trial, tries, fallback, request, benchmark, cache)


def verdict_cache(
    request: GraphRequest, entries: Sequence[ChainEntry], benchmark: select.Benchmark
) -> verdicts.VerdictCache | None:
    """Return the cache of a benchmark's verdict; ``None`` if the verdict cannot be remembered."""
    if benchmark.terms is None:
        return None
    key = verdicts.key_of(request, entries)
    if key is None:
        session.current().unkept[request.graph_key] = "nobody knows what the engines are"
        return None
    return verdicts.VerdictCache(request, entries, benchmark.terms, key)


def _try_in_turn(
    trial: Callable[[int], choice.Tried],
    number: int,
    done: Mapping[int, choice.Tried] = MappingProxyType({}),
    *,
    strict: bool,
) -> Iterator[choice.Tried]:
    """Yield the tried candidates in turn, up to an accepted one that is eager itself.

    Args:
        trial: Tries the candidate at a place of the chain.
        number: The number of candidates.
        done: The candidates that were tried before, by their places.
        strict: End at the first candidate that is not accepted.
    """
    for place in range(number):
        tried = done.get(place) or trial(place)
        yield tried
        if tried.is_fallback and tried.attempt.accepted:
            return
        if strict and _is_refused(tried.attempt):
            return


def _is_refused(attempt: Attempt) -> bool:
    """Return True if a candidate was not accepted, although it should have been under ``strict``.

    A candidate that the policy skips, or has on trial, need not be accepted.
    """
    return not (attempt.accepted or attempt.status is Status.SKIPPED or attempt.on_trial)


_FAULTS = (Status.FAILED, Status.REJECTED, Status.TIMED_OUT, Status.CRASHED)


def objection(
    outcome: Outcome, *, strict: bool, on_exhausted: str, shows_faults: bool = False
) -> Exception | None:
    """Return the error to raise, if the user asked for an error rather than a fallback.

    It is a ``CandidateError`` under ``strict`` if a candidate was not accepted, and
    ``ChainExhausted`` under ``on_exhausted="raise"`` if none was. A candidate that was slower in a
    benchmark counts as accepted, and one on trial need not be accepted. With ``shows_faults``, it
    is the error of the first candidate that failed.
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
