"""The walk from a captured graph to the callable that serves it. Start reading here.

What was captured is read in :mod:`composer.graphs` and edited in :mod:`composer.passes`. Then
:mod:`composer.chain` has candidates built (:mod:`composer.backends`, by :mod:`composer.lowering`),
first in a child process if the policy says so (:mod:`composer.isolate`), checked
(:mod:`composer.verify`) and one of them chosen (:mod:`composer.select`). At every call after that
:mod:`composer.guard` is there. :mod:`composer.store` keeps what the next process should know,
:mod:`composer.saved` is what torch writes to a file, and :mod:`composer.telemetry` tells the user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch.fx

from composer import _torch, book, chain, contenders, guard, lock, saved, select, session
from composer.graphs import capture, clones
from composer.guard import backward, overtaking, standby
from composer.guard.succession import Succession
from composer.lowering import once
from composer.passes import early, resolve
from composer.policy import Facts, Policy, Rules
from composer.records import CompileReport, GraphRequest, Outcome, PassRecord
from composer.telemetry import notices


def compose(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph with a candidate of the chain: the first accepted, or the fastest.

    This is the backend that ``torch.compile(model, backend="composer")`` calls for every graph.

    Args:
        gm: The graph as Dynamo captured it; neither it nor ``example_inputs`` is changed.
        example_inputs: Tensors and symbols of the first call, in the order of the placeholders.
        mode: ``torch.compile``'s mode.
        options: ``torch.compile``'s options: fields of :class:`composer.Policy`.

    Returns:
        A callable that takes the graph's inputs and returns its outputs; one that torch can write
        to a file, where it is going to.

    Raises:
        OptionError, UnknownNameError: the user's own mistakes.
        LockError: the policy is ``locked``, and the graph is not as ``composer.lock`` has it.
        PassError: a pass failed and ``on_pass_error`` is ``"raise"``.
        CandidateError: a candidate was not accepted and ``strict`` is on.
        ChainExhausted: none was accepted and ``on_exhausted`` is ``"raise"``.
    """
    if _torch.goes_to_a_file():
        with _torch.stays_here():
            served = compose(gm, example_inputs, mode=mode, options=options)
        return saved.Saved.of(gm, served, mode, options)
    started = time.perf_counter()
    gm, restore = clones.flat_outputs(gm)
    case = _case_of(capture.read_request(gm, example_inputs, mode=mode), options)
    later = overtaking.Plan.of(case.policy, case.request, case.candidates)
    with once.sharing(), backward.watched() as backwards:
        outcome = _walk(case, later)
    report = _told(case, outcome, time.perf_counter() - started)
    successors = Succession(
        request=case.request,
        contenders=case.candidates,
        shared=case.shared,
        policy=case.policy,
        early=case.rewritten,
        report=report,
        outcome=outcome,
        asked_by_name=case.rules.names_chain,
    )
    return guard.watch(
        standby.Engine(outcome.compiled, backwards),
        report.runtime,
        restore,
        successors.rescue(),
        successors.sampler(),
        later.behind(successors) if later else None,
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """One graph, as the first passes left it, and what is wanted of it.

    ``policy`` is that of ``rules``, or what a lock makes of it. ``rewritten`` is the record of the
    passes that have run.
    """

    request: GraphRequest
    rules: Rules
    policy: Policy
    candidates: tuple[contenders.Contender, ...]
    shared: resolve.SharedPasses
    rewritten: tuple[PassRecord, ...]


def _case_of(request: GraphRequest, options: Mapping[str, Any] | None) -> _Case:
    """Find out what is wanted of a graph, and run the passes that come before every candidate."""
    mode = request.mode
    rules = book.resolve(Facts.of(request), mode, options, session.current().configured)
    policy = rules.policy
    candidates = contenders.resolve(policy)
    shared = resolve.resolve(policy.passes, policy.on_pass_error)
    request = capture.known_by(request, policy.model, f"{mode} {policy.key} {shared.key}")
    policy, candidates = lock.hold(request, policy, candidates, shared)
    with session.current().progress.step(request, "shared passes"):
        request, rewritten = early.rewrite(request, shared)
    return _Case(request, rules, policy, candidates, shared, rewritten)


def _walk(case: _Case, later: overtaking.Plan | None) -> Outcome:
    """Try the candidates; where the fastest is to be found later, until the first is accepted."""
    outcome = chain.walk(
        case.request,
        case.candidates,
        case.shared,
        contest=None if later else select.Contest.of(case.policy),
        strict=case.policy.strict,
        agree_within=case.policy.agree_within,
    )
    return later.announced(outcome) if later else outcome


def _told(case: _Case, outcome: Outcome, seconds: float) -> CompileReport:
    """Keep the record and send it; then raise, or warn, where the user is to hear of it."""
    policy, here = case.policy, session.current()
    objection = chain.objection(outcome, strict=policy.strict, on_exhausted=policy.on_exhausted)
    report = _report(case, outcome, "" if objection else outcome.chosen, seconds)
    here.keep(report)
    here.sinks.emit(report)
    if objection:
        raise objection
    notices.warn_of_fallbacks(report, here.warned, asked_by_name=case.rules.names_chain)
    notices.warn_of_passes(report, here.warned)
    return report


def _report(case: _Case, outcome: Outcome, chosen: str, seconds: float) -> CompileReport:
    request = case.request
    return CompileReport(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        graph_id=request.graph_id,
        graph_key=request.graph_key,
        model=request.model,
        device=request.device,
        dtype=request.dtype,
        training=request.training,
        dynamic=request.dynamic,
        nodes=request.nodes,
        inputs=request.inputs,
        policy=case.rules.layers,
        passes=(*case.rewritten, *outcome.passes),
        attempts=outcome.attempts,
        chosen=chosen,
        seconds=seconds,
    )
