"""The fallback chain: each candidate on its own copy of the graph, until one is accepted."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from composer import _torch, agreement, isolate, select, session
from composer.backends.base import (
    Backend,
    Notes,
    computing_in,
    note,
    taking_notes,
    within,
)
from composer.contenders import Contender
from composer.errors import (
    CandidateError,
    ChainExhausted,
    ChildRefusal,
    PassError,
    Refusal,
    causes,
    refuse,
    text_of,
)
from composer.graphs import checkpoints, clones, collectives
from composer.lowering import keeping
from composer.lowering.each import compile_each
from composer.lowering.freeze import freezing
from composer.memory import lacks_memory
from composer.passes import late
from composer.passes.resolve import SharedPasses
from composer.records import FLOOR, Attempt, GraphRequest, Outcome, Reason, Status
from composer.select import choice, remembered
from composer.store import verdicts
from composer.verify import prove, verify


def walk(
    request: GraphRequest,
    contenders: Sequence[Contender],
    shared: SharedPasses | None = None,
    contest: select.Contest | None = None,
    *,
    strict: bool,
    agree_within: float = 0.0,
    at_run_time: bool = False,
) -> Outcome:
    """Try one candidate after the other, and choose who serves the graph.

    Without a ``contest`` that is the first candidate that is accepted, else the fastest of those
    that are. The floor serves where no candidate does.

    Args:
        request: The graph, as the passes of the stages ``torch`` and ``aten`` left it.
        contenders: The chain.
        shared: The passes of the later stages, which every candidate and the floor run.
        contest: How the fastest is found; ``None`` takes the first that is accepted.
        strict: End the walk at the first candidate that is not accepted.
        agree_within: Seconds to wait for other ranks of ``torch.distributed``; 0 asks none.
        at_run_time: Whether Dynamo's compile is over. Its control-flow exceptions then fail a
            candidate, as any other error does.

    Raises:
        PassError: a pass failed, and the policy says ``on_pass_error = "raise"``.
    """
    shared = shared or SharedPasses()
    make_floor = functools.partial(_floor_of, request, shared)
    obstacle = select.obstacle(request, among_ranks=agree_within > 0) if contest else ""
    with agreement.among_ranks(request.key_among_ranks, agree_within) as ballot:

        def trial(place: int) -> choice.Tried:
            return _try_and_remember(
                request, contenders[place], shared, ballot(place), at_run_time=at_run_time
            )

        tries = functools.partial(_try_in_turn, trial, len(contenders), strict=strict)
        if contest is None or obstacle:
            return choice.first(tries(), make_floor, why=obstacle)
        memory = None if at_run_time else memory_of(request, contenders, contest)
        return remembered.fastest(trial, tries, make_floor, request, contest, memory)


def memory_of(
    request: GraphRequest, contenders: Sequence[Contender], contest: select.Contest
) -> verdicts.Memory | None:
    """Where the verdict of a contest is kept; ``None`` where the policy remembers none."""
    if not contest.terms:
        return None
    engines = [(each.candidate.name, each.backend) for each in contenders]
    return verdicts.Memory(request, engines, contest.terms, [each.key for each in contenders])


def _try_in_turn(
    trial: Callable[[int], choice.Tried],
    number: int,
    done: Mapping[int, choice.Tried] = MappingProxyType({}),
    *,
    strict: bool,
) -> Iterator[choice.Tried]:
    """Yield the candidates in turn; an accepted one that is the floor itself ends the chain.

    Args:
        trial: Tries the candidate at a place of the chain.
        number: Of the candidates.
        done: Those that were tried before, by their places.
        strict: End at the first that is not accepted.
    """
    for place in range(number):
        tried = done.get(place) or trial(place)
        attempt = tried.attempt
        yield tried
        refused = not (attempt.accepted or attempt.status is Status.SKIPPED or attempt.on_trial)
        if (strict and refused) or (tried.is_floor and attempt.accepted):
            return


def _try_and_remember(
    request: GraphRequest,
    contender: Contender,
    shared: SharedPasses,
    ballot: agreement.Ballot,
    *,
    at_run_time: bool,
) -> choice.Tried:
    """One attempt with the shared passes within it; a failure that was expensive is remembered."""
    name, is_floor = contender.candidate.name, contender.backend.may_return_original
    step = session.current().progress.step(request, name)
    with step, late.running(late.LatePasses(shared, name)) as passes:
        attempt, compiled, error = try_candidate(
            request, contender, ballot, at_run_time=at_run_time
        )
    if error is not None:
        contender.remember(request, attempt, error)
    return choice.Tried(attempt, compiled, error, passes.records, is_floor)


def floor(request: GraphRequest, shared: SharedPasses) -> Callable[..., Any]:
    """What runs where no engine does: the graph, and the shared passes of the later stages."""
    return _floor_of(request, shared)[0]


def _floor_of(request: GraphRequest, shared: SharedPasses) -> choice.Made:
    with late.running(late.LatePasses(shared, FLOOR)) as passes:
        return _floor(request, passes), passes.records


def _forward_of(functional: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    return _torch.settled_forward(functional)


def _floor(request: GraphRequest, passes: late.LatePasses) -> Callable[..., Any]:
    """The graph's own forward; with passes of the later stages, of AOTAutograd's graphs.

    Where AOTAutograd cannot make those, the passes are recorded as not run.
    """
    if passes.shared.late:
        gm = clones.clone_graph(request.gm)
        try:
            return compile_each(gm, request.example_inputs, _forward_of)
        except _torch.DYNAMO_CONTROL_FLOW:
            raise
        except PassError:
            raise
        except Exception as error:  # noqa: BLE001  # recorded; the floor always answers
            passes.fail(error)
    return checkpoints.eager_forward(request.gm)


def objection(outcome: Outcome, *, strict: bool, on_exhausted: str) -> Exception | None:
    """The error to raise where the user asked for one rather than for a fallback.

    That is a ``CandidateError`` under ``strict`` when a candidate was not accepted, and
    ``ChainExhausted`` under ``on_exhausted="raise"`` when none was. A candidate that was measured
    to be slower had been accepted before, and one on trial need not be accepted.
    """
    refused = [
        attempt
        for attempt in outcome.attempts
        if not attempt.accepted and attempt.reason is not Reason.SLOWER
    ]
    for attempt, cause in zip(refused, outcome.errors, strict=True):
        if strict and not (attempt.status is Status.SKIPPED or attempt.on_trial):
            error = CandidateError(attempt)
            error.__cause__ = cause
            return error
    if on_exhausted == "raise" and len(refused) == len(outcome.attempts):
        return ChainExhausted(outcome.attempts, outcome.errors)
    return None


def try_candidate(
    request: GraphRequest,
    contender: Contender,
    ballot: agreement.Ballot = agreement.NOBODY,
    *,
    at_run_time: bool = False,
) -> tuple[Attempt, Callable[..., Any] | None, Exception | None]:
    """One attempt: its record, and either the compiled callable or the error that ended it.

    Other ranks are asked by ``ballot``, except for eager, which all of them can take.
    ``KeyboardInterrupt`` and ``SystemExit`` pass through, and so does Dynamo's control flow while
    Dynamo's compile is under way.
    """
    name = contender.candidate.name
    ballot = agreement.NOBODY if contender.backend.may_return_original else ballot
    started = time.perf_counter()
    with taking_notes() as notes:
        if contender.on_trial:
            note(on_trial=True)
        try:
            compiled = _probe_and_build(request, contender, ballot)
            _decline_low_coverage(notes, contender.min_coverage)
            _verify(compiled, request, contender)
            ballot.accept()
        except Exception as error:
            if isinstance(error, _torch.DYNAMO_CONTROL_FLOW) and not at_run_time:
                raise
            ballot.refuse(_failed(name, error, notes, 0.0).sentence())
            _raise_pass_error(error)
            return _failed(name, error, notes, time.perf_counter() - started), None, error
    accepted = Attempt(
        backend=name,
        status=Status.SUCCEEDED,
        reason=None,
        message="",
        seconds=time.perf_counter() - started,
        coverage=notes.coverage,
        engine=notes.engine,
    )
    return accepted, compiled, None


def _probe_and_build(
    request: GraphRequest, contender: Contender, ballot: agreement.Ballot
) -> Callable[..., Any]:
    contender.skip(request)
    contender.backend.probe(request)
    contender.recall(request)
    found = contender.narrowed(request)
    ballot.open()
    if found is not None and not contender.backend.chooses_precision:
        return found.around(_build_within_limits(found.request, contender))
    with computing_in("fp32" if found is None else "bf16"):
        return _build_within_limits(request, contender)


def _build_within_limits(request: GraphRequest, contender: Contender) -> Callable[..., Any]:
    limits, backend = contender.limits, contender.backend
    if limits.isolate and not (backend.may_return_original or backend.isolates_itself):
        isolate.probe(
            request, contender.candidate, limits, contender.min_coverage, contender.freeze
        )
    with within(limits), keeping.keeping(contender.keep_gib), freezing(contender.freeze):
        return _build(request, contender)


def _build(request: GraphRequest, contender: Contender) -> Callable[..., Any]:
    backend, options = contender.backend, contender.candidate.options
    gm = clones.clone_graph(request.gm)
    inputs = list(request.example_inputs)
    if backend.reads_example_inputs:
        inputs = clones.copy_inputs(inputs, keep=request.weights)
    versions = _weight_versions(request)
    buffers = clones.Buffers(request) if backend.reads_example_inputs else None
    build = functools.partial(backend.build, mode=request.mode, options=options)
    donation = contextlib.nullcontext() if backend.runs_shared_passes else _torch.donating_nothing()
    try:
        with _torch.eager_backward_lowering(), donation:
            if late.in_force().shared.late and not backend.runs_shared_passes:
                compiled: object = compile_each(
                    gm, inputs, functools.partial(_build_part, build, backend)
                )
            else:
                compiled = build(gm, inputs)
    finally:
        moved = buffers is not None and buffers.restore()
    if moved or (_weight_versions(request) != versions and not request.alongside):
        what = "the backend wrote to the model's weights or buffers while compiling"
        refuse(Status.REJECTED, Reason.MUTATED_INPUTS, what)
    return prove.proven(compiled, None if backend.may_return_original else request.gm)


def _verify(compiled: Callable[..., Any], request: GraphRequest, contender: Contender) -> None:
    """Compare with what the floor computes, where the policy asks for it."""
    if contender.bounds is None or contender.backend.may_return_original:
        return
    if collectives.meets_other_ranks(request.gm):
        note(verified="no: other ranks would have to run the graph's collectives as well")
        return
    reference = floor(request, late.in_force().shared)
    compared = verify(compiled, request, reference, contender.bounds)
    if contender.on_trial and not compared:
        refuse(Status.SKIPPED, Reason.POLICY, "in bf16 its numbers could not be compared")


def _build_part(
    build: Callable[..., object],
    backend: Backend,
    functional: torch.fx.GraphModule,
    inputs: list[Any],
) -> Callable[..., Any]:
    """Have a backend compile one of AOTAutograd's graphs, and prove that it did."""
    compiled = build(clones.clone_graph(functional), inputs)
    return prove.proven(compiled, None if backend.may_return_original else functional)


def _raise_pass_error(error: Exception) -> None:
    """Re-raise a pass's error (``on_pass_error="raise"``): it is no fault of the engine's."""
    for cause in causes(error):
        if isinstance(cause, PassError):
            raise cause


def _decline_low_coverage(notes: Notes, least: float) -> None:
    """Refuse an engine that says it takes a smaller share of the graph than the policy asks for."""
    if notes.coverage is None or notes.coverage >= least:
        return
    share = (
        f"{notes.taken} of {notes.total} compute nodes" if notes.total else f"{notes.coverage:.0%}"
    )
    rest = f", not {', '.join(notes.left)}" if notes.left else ""
    what = f"the engine takes {share}{rest}; min_coverage is {least:g}"
    refuse(Status.DECLINED, Reason.LOW_COVERAGE, what)


def _weight_versions(request: GraphRequest) -> list[int]:
    """The version counter of every parameter that has one (inference tensors have none)."""
    passed = (request.example_inputs[i] for i in sorted(request.weights))
    weights = (*passed, *request.gm.parameters())
    parameters = (w for w in weights if isinstance(w, torch.nn.Parameter) and not w.is_inference())
    return [parameter._version for parameter in parameters]


def _failed(name: str, error: Exception, notes: Notes, seconds: float) -> Attempt:
    """The record of an attempt that ``error`` ended."""
    status, reason = classify(error)
    # A plain "no" carries no traceback worth reading; one that wraps an error shows that error.
    fault = error.__cause__ if isinstance(error, Refusal) else error
    said = "".join(traceback.format_exception(fault)) if fault else ""
    kind = type(fault).__name__ if fault else ""
    if isinstance(error, ChildRefusal):
        kind, said = error.error_type, error.traceback
    return Attempt(
        backend=name,
        status=status,
        reason=reason,
        message=text_of(error),
        seconds=seconds,
        coverage=notes.coverage,
        engine=notes.engine,
        error_type=kind,
        traceback=said,
    )


def classify(error: Exception) -> tuple[Status, Reason]:
    """The status and the reason code of an exception that ended an attempt."""
    if isinstance(error, Refusal):
        return error.status, error.reason
    chained = tuple(causes(error))
    if any(map(lacks_memory, chained)):
        return Status.FAILED, Reason.OUT_OF_MEMORY
    if any(isinstance(each, ImportError) for each in chained):
        return Status.UNAVAILABLE, Reason.NOT_INSTALLED
    return Status.FAILED, Reason.BUILD_FAILED
