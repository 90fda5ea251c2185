"""The walk from a captured graph to the callable that serves it. Start reading here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch.fx

from composer import (
    backward,
    book,
    capture,
    chain,
    clones,
    contenders,
    guard,
    lock,
    overtaking,
    select,
    session,
    standby,
)
from composer.lowering import once
from composer.passes import early, resolve
from composer.policy import Facts, Rules
from composer.records import Attempt, CompileReport, GraphRequest, PassRecord
from composer.succession import Succession
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
        A callable that takes the graph's inputs and returns its outputs.

    Raises:
        OptionError, UnknownNameError: the user's own mistakes.
        LockError: the policy is ``locked``, and the graph is not as ``composer.lock`` has it.
        PassError: a pass failed and ``on_pass_error`` is ``"raise"``.
        CandidateError: a candidate was not accepted and ``strict`` is on.
        ChainExhausted: none was accepted and ``on_exhausted`` is ``"raise"``.
    """
    started = time.perf_counter()
    gm, restore = clones.flat_outputs(gm)
    request = capture.read_request(gm, example_inputs, mode=mode)
    rules = book.resolve(Facts.of(request), mode, options, session.current().configured)
    policy = rules.policy
    candidates = contenders.resolve(policy)
    shared = resolve.resolve(policy.passes, policy.on_pass_error)
    request = capture.known_by(request, policy.model, f"{mode} {policy.key} {shared.key}")
    policy, candidates = lock.hold(request, policy, candidates, shared)
    with session.current().progress.step(request, "shared passes"):
        request, rewritten = early.rewrite(request, shared)
    later = overtaking.Plan.of(policy, request, candidates)
    contest = None if later else select.Contest.of(policy)
    with once.sharing(), backward.watched() as backwards:
        outcome = chain.walk(
            *(request, candidates, shared, contest),
            strict=policy.strict,
            agree_within=policy.agree_within,
        )
    outcome = later.announced(outcome) if later else outcome
    passes = (*rewritten, *outcome.passes)
    objection = chain.objection(outcome, strict=policy.strict, on_exhausted=policy.on_exhausted)
    chosen = "" if objection else outcome.chosen
    seconds = time.perf_counter() - started
    report = _report(request, rules, passes, outcome.attempts, chosen, seconds)
    session.current().keep(report)
    session.current().sinks.emit(report)
    if objection:
        raise objection
    warned = session.current().warned
    notices.warn_of_fallbacks(report, warned, asked_by_name=rules.names_chain)
    notices.warn_of_passes(report, warned)
    successors = Succession(
        *(request, candidates, shared, policy, rewritten, report, outcome),
        asked_by_name=rules.names_chain,
    )
    return guard.watch(
        standby.Engine(outcome.compiled, backwards),
        report.runtime,
        restore,
        successors.rescue(),
        successors.sampler(),
        later.behind(successors) if later else None,
    )


def _report(
    request: GraphRequest,
    rules: Rules,
    passes: tuple[PassRecord, ...],
    attempts: tuple[Attempt, ...],
    chosen: str,
    seconds: float,
) -> CompileReport:
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
        policy=rules.layers,
        passes=passes,
        attempts=attempts,
        chosen=chosen,
        seconds=seconds,
    )
