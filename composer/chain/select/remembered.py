"""The verdict of an earlier benchmark: recalled, kept, and made the outcome of a walk again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from datetime import UTC
from typing import Any

from composer import session
from composer.chain.candidates import ChainEntry
from composer.chain.select import choice
from composer.chain.select.benchmark import Benchmark
from composer.chain.select.decision import Decision
from composer.chain.select.rules import lost_a_tie
from composer.graphs import sizes
from composer.knowledge.facts import Known
from composer.knowledge.failure import REMEDY
from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.quarantine import Quarantined
from composer.knowledge.verdict import CandidateRecord, Verdict, deserves_verdict
from composer.records import Attempt, GraphRequest, Outcome, Reason, Status, plain
from composer.system import hardware
from composer.system.disk import this_process


def fingerprint_of(request: GraphRequest, entries: Sequence[ChainEntry]) -> Fingerprint:
    """Return the fingerprint of a graph and its whole chain, on which a verdict depends."""
    return Fingerprint(request, tuple(each.parts for each in entries))


def recall(whole: Fingerprint, benchmark: Benchmark) -> Known[Verdict]:
    """Return the verdict on a graph, if one is known that can be used."""
    knowledge = session.current().knowledge
    known = knowledge.recall(Verdict, whole, benchmark.cache)
    if known.fact is None:
        return known
    verdict = known.fact.nearest(sizes.size_of(whole.request))
    if not _can_be_used(verdict, whole, benchmark):
        return Known()
    knowledge.unkept[whole.request.graph_key] = known.trouble
    return dataclasses.replace(known, fact=verdict)


def _can_be_used(verdict: Verdict, whole: Fingerprint, benchmark: Benchmark) -> bool:
    """Return False if the candidates are to be measured now, although there is a verdict."""
    if verdict.has_too_few_rounds and benchmark.least_seconds > verdict.seconds:
        return False
    if verdict.is_provisional and _is_measured_anew(verdict, benchmark):
        return False
    if verdict.winner is None:
        return True
    winner = Fingerprint(whole.request, (whole.candidates[verdict.winner],))
    knowledge = session.current().knowledge
    return knowledge.recall(Quarantined, winner, benchmark.cache).fact is None


def _is_measured_anew(verdict: Verdict, benchmark: Benchmark) -> bool:
    """Return True if a provisional verdict is not to serve, because all are to be measured now.

    Where it is made anew beside the program, it serves until then. Else the next process measures
    at its first call, unless it meets a load as well.
    """
    if benchmark.renews or verdict.process == this_process():
        return False
    return not hardware.Waits().beside_load()


def keep(whole: Fingerprint, benchmark: Benchmark, outcome: Outcome) -> None:
    """Remember the outcome of a benchmark, unless it would probably differ the next time.

    The fingerprint was made before the benchmark.
    """
    if not benchmark.cache.verdicts:
        return
    knowledge = session.current().knowledge
    if not deserves_verdict(outcome):
        trouble = "some candidate may well be measured the next time that was not now"
    else:
        verdict = Verdict.of(whole, outcome, benchmark.least_seconds)
        join = Verdict.and_at if benchmark.ranges > 1 else None
        trouble = knowledge.learn(verdict, whole, benchmark.cache, join=join)
    knowledge.unkept[whole.request.graph_key] = trouble


def decision(
    whole: Fingerprint, benchmark: Benchmark, entries: Sequence[ChainEntry]
) -> Decision | None:
    """Return the decision that an earlier benchmark has made; ``None`` if none is known."""
    known = recall(whole, benchmark)
    return None if known.fact is None else _decision(known.fact, known.source, entries)


def decisions(
    whole: Fingerprint, benchmark: Benchmark, entries: Sequence[ChainEntry]
) -> list[Decision]:
    """Return the decisions that earlier benchmarks have made at all sizes of a graph."""
    known = session.current().knowledge.recall(Verdict, whole, benchmark.cache)
    verdicts = () if known.fact is None else known.fact.at_all_sizes
    usable = (each for each in verdicts if _can_be_used(each, whole, benchmark))
    return [_decision(each, known.source, entries) for each in usable]


def _decision(verdict: Verdict, source: str, entries: Sequence[ChainEntry]) -> Decision:
    # The chain may go on behind an eager that ended the walk.
    places = zip(verdict.candidates, entries, strict=False)
    attempts = (_remembered(each, entry, verdict, source) for each, entry in places)
    return Decision(tuple(attempts), verdict.ranking, lasts=False, in_sandbox=False)


def _remembered(each: CandidateRecord, entry: ChainEntry, verdict: Verdict, source: str) -> Attempt:
    """Return the record of a candidate that is not built now: it was slower, or not accepted."""
    attempt = functools.partial(
        Attempt,
        each.backend,
        seconds=0.0,
        engine={"precision": each.precision} if each.precision else {},
        precision=each.precision,
        options=plain(dict(entry.candidate.options)),
    )
    if each.timing:
        slower = attempt(Status.NOT_CHOSEN, Reason.SLOWER, _slower(each, verdict))
        return slower.timed(_timing(each, verdict, source))
    return attempt(Status.SKIPPED, each.reason or Reason.POLICY, _refused(each, verdict))


def _timing(each: CandidateRecord, verdict: Verdict, source: str) -> dict[str, Any]:
    """Return the remembered times; measuring them took no time now."""
    measured = verdict.learnt.astimezone(UTC).isoformat(timespec="seconds")
    now = {"seconds": 0.0, "measured": measured, "remembered_in": source}
    return {**each.figures, **now}


def _slower(each: CandidateRecord, verdict: Verdict) -> str:
    best = verdict.best
    message = f"{each.milliseconds:.3g} ms a call"
    if verdict.size is not None:
        message += f" of size {verdict.size:,}"
    if "build_ms" in each.figures:
        message += ", its build counted"
    message += f"; {best.who} takes {best.milliseconds:.3g} ms, as measured on {_date(verdict)}"
    is_tie = lost_a_tie(each.milliseconds, best.milliseconds)
    return choice.with_circumstances(message, is_tie=is_tie, under_load=verdict.is_provisional)


def _refused(each: CandidateRecord, verdict: Verdict) -> str:
    if each.reason is Reason.POLICY:
        return each.message
    # What failed at a cost is kept among failures as well, and would be skipped for that again.
    remedy = "`composer cache clear verdicts failures` has it tried again"
    when, message = f"when it was tried on {_date(verdict)}", each.message.removesuffix(REMEDY)
    return f"{each.status} ({each.reason}) {when}: {message}; {remedy}"


def _date(verdict: Verdict) -> str:
    return f"{verdict.learnt.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
