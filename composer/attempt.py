"""One attempt: a candidate is probed, built on a copy of the graph, proven, and verified.

What becomes of it is a record (:class:`~composer.records.Attempt`). Who is tried next, and who
serves, is :mod:`composer.chain`'s to decide.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch.fx

from composer import _torch, agreement, interrupts, isolate, mixed
from composer.backends.base import (
    Backend,
    note,
    within,
)
from composer.build import Notes, during
from composer.contenders import Contender
from composer.errors import (
    ChildRefusal,
    PassError,
    Refusal,
    causes,
    first_line,
    refuse,
    text_of,
    without_locals,
)
from composer.graphs import clones, sharing, writes
from composer.graphs.comparison import Bounds
from composer.graphs.modes import leaving_modes
from composer.lowering.each import compile_each
from composer.memory import lacks_memory
from composer.passes import late
from composer.precision import Narrow
from composer.records import Attempt, GraphRequest, Reason, Status, plain
from composer.select.choice import Tried
from composer.verify import prove, verify


def try_candidate(
    request: GraphRequest,
    contender: Contender,
    ballot: agreement.Ballot = agreement.NOBODY,
    in_fp32: int = 0,
    *,
    require_working: Callable[[Contender, GraphRequest], None] = lambda contender, request: None,
    at_run_time: bool = False,
) -> Tried:
    """One attempt: its record, and either the compiled callable or the error that ended it.

    The error keeps no local variables of its traceback: the next candidate needs their memory.
    Other ranks are asked by ``ballot``, except for eager, which all of them can take. On trial in
    bf16 ``in_fp32`` of the first products were found to have to stay in float32, earlier.
    ``require_working`` refuses an engine that does not work with the installed versions.
    ``KeyboardInterrupt`` and ``SystemExit`` pass through, so does what the handler of a signal
    raises, and Dynamo's control flow while Dynamo's compile is under way; all else is a failure, an
    ``Exception`` or not.
    """
    name = contender.candidate.name
    is_floor = contender.backend.may_return_original
    ballot = agreement.NOBODY if is_floor else ballot
    started, handled = time.perf_counter(), sys.exception()
    notes = Notes()
    with during(notes=notes):
        if contender.candidate.options:
            note(options=plain(dict(contender.candidate.options)))
        if contender.on_trial:
            note(on_trial=True)
        if lacks := _torch.names.off(look=False):
            note(torch_lacks=lacks)
        try:
            with _torch.modes.modes_put_back():  # else the next would be built in those of a region
                contender.skip(request)
                _decline_forward_mode(contender.backend)
                if not contender.backend.may_return_original:
                    sharing.decline_shared(request)
                contender.backend.probe(request)
                contender.recall(request)
                if not contender.limits.isolate:  # else the child process does
                    require_working(contender, request)
                compiled, bounds = _acceptable(request, contender, ballot, notes, in_fp32)
            ballot.accept()
        except BaseException as error:
            interrupts.pass_on(error)
            if isinstance(error, _torch.dynamo.DYNAMO_CONTROL_FLOW) and not at_run_time:
                raise
            failed = _failed(name, error, notes, time.perf_counter() - started)
            ballot.refuse(failed.sentence())
            _raise_pass_error(error)
            return Tried(failed, None, without_locals(error, handled), is_floor=is_floor)
    accepted = Attempt(
        backend=name,
        status=Status.SUCCEEDED,
        reason=None,
        message="",
        seconds=time.perf_counter() - started,
        coverage=notes.coverage,
        engine=notes.engine,
    )
    return Tried(accepted, compiled, is_floor=is_floor, bounds=bounds)


_OFF = (Reason.NUMERIC_MISMATCH, Reason.NON_FINITE)
"""What a smaller part in bf16 may make good."""


def _acceptable(
    request: GraphRequest,
    contender: Contender,
    ballot: agreement.Ballot,
    notes: Notes,
    in_fp32: int,
) -> tuple[Callable[..., Any], Bounds | None]:
    """What the candidate compiled: on trial in bf16 the largest part whose numbers hold is in it.

    With how far its numbers may be off.

    Ranks that are to take the same engine may not find the same part: there it is all or nothing.
    """
    parts: Iterator[int] = iter((0,))
    if contender.on_trial and ballot is agreement.NOBODY and contender.bounds_in_bf16:
        parts = mixed.parts(request, contender.bounds_in_bf16)
        parts = itertools.chain((in_fp32,), parts) if in_fp32 else parts
    in_fp32, told, began = next(parts), dict(notes.engine), time.perf_counter()
    timeout = contender.limits.timeout or math.inf
    while True:
        try:
            return _built_and_verified(request, contender, ballot, notes, in_fp32)
        except Refusal as refusal:
            in_time = time.perf_counter() - began < timeout
            smaller = next(parts, None) if in_time and refusal.reason in _OFF else None
            if smaller is None:
                raise
            in_fp32 = smaller
            notes.begin_again(told)


def _built_and_verified(
    request: GraphRequest,
    contender: Contender,
    ballot: agreement.Ballot,
    notes: Notes,
    in_fp32: int,
) -> tuple[Callable[..., Any], Bounds | None]:
    """Build in the candidate's precision, but for so many of the first products, and compare.

    An engine that computes in bf16 by an option of its own is held to what fp32 is.
    """
    found = contender.narrowed(request, in_fp32)
    bounds = contender.bounds if found is None else contender.bounds_in_bf16
    ballot.open()
    compiled = _build_in_precision(request, contender, found)
    _decline_low_coverage(notes, contender.min_coverage)
    _verify(compiled, request, contender, bounds, keeps_nan=notes.keeps_nan)
    return compiled, bounds


def _build_in_precision(
    request: GraphRequest, contender: Contender, found: Narrow | None
) -> Callable[..., Any]:
    if found is None:
        return _build_within_limits(request, contender)
    with during(precision="bf16" if contender.backend.chooses_precision else "fp32"):
        return found.around(_build_within_limits(found.request, contender))


def _decline_forward_mode(backend: Backend) -> None:
    """Refuse where tensors may carry tangents: an engine computes without them, and says nothing.

    What AOTAutograd trains has no rule for them; Inductor drops them from what it fuses.
    """
    if _torch.modes.is_forward_mode() and not backend.may_return_original:
        what = "no engine computes the tangents of torch.autograd.forward_ad"
        refuse(Status.DECLINED, Reason.TRAINING_GRAPH, what)


def _build_within_limits(request: GraphRequest, contender: Contender) -> Callable[..., Any]:
    limits, backend = contender.limits, contender.backend
    if limits.isolate and not (backend.may_return_original or backend.isolates_itself):
        isolate.rehearse(
            request, contender.candidate, limits, contender.min_coverage, contender.freeze
        )
    with within(limits), during(keep_gib=contender.keep_gib, freeze=contender.freeze):
        return _build(request, contender)


def _build(request: GraphRequest, contender: Contender) -> Callable[..., Any]:
    """Build on copies, and find out what the build wrote to all the same; buffers are put back.

    Raises:
        Refusal: ``rejected``, where it wrote to the model, or did nothing; or the engine's own.
    """
    backend, options = contender.backend, contender.candidate.options
    gm = clones.clone_graph(request.gm)
    inputs = list(request.example_inputs)
    if backend.reads_example_inputs:
        inputs = clones.copy_inputs(inputs, keep=request.weights)
    left_alone = clones.LeftAlone(request)
    buffers = clones.Buffers(request) if backend.reads_example_inputs else None
    build = functools.partial(backend.build, mode=request.mode, options=options)
    try:
        with _aot_settings(request, backend):
            if late.in_force().shared.late and not backend.runs_shared_passes:
                compiled: object = compile_each(
                    gm, inputs, functools.partial(_build_part, build, backend)
                )
            else:
                compiled = build(gm, inputs)
    finally:
        moved = buffers is not None and buffers.restore()
    if moved or left_alone.written():
        who = "the backend, or another thread of the program,"
        what = f"{who} wrote to the model's weights or buffers while compiling"
        refuse(Status.REJECTED, Reason.MUTATED_INPUTS, what)
    run = prove.proven(compiled, None if backend.may_return_original else request.gm)
    run = run if backend.may_return_original else sharing.watched(run, request)
    return run if backend.writes_as_the_graph else leaving_modes(run, request.gm)


@contextlib.contextmanager
def _aot_settings(request: GraphRequest, backend: Backend) -> Iterator[None]:
    """Have AOTAutograd make backwards whose failure is the attempt's, and whose numbers are right.

    A backend that runs the shared passes itself has AOTAutograd's step in hand, and with it what
    is donated to a backward; for any other nothing is.
    """
    with contextlib.ExitStack() as settings:
        settings.enter_context(_torch.aot.backward_lowering_at_once())
        if not backend.runs_shared_passes:
            settings.enter_context(_torch.aot.without_donated_buffers())
        if request.training and writes.reads_what_it_wrote(request.gm):
            settings.enter_context(_torch.aot.keeping_no_weights_for_free())
        yield


def _verify(
    compiled: Callable[..., Any],
    request: GraphRequest,
    contender: Contender,
    bounds: Bounds | None,
    *,
    keeps_nan: bool,
) -> None:
    """Compare with what the floor computes, where the policy asks for it."""
    if bounds is None or contender.backend.may_return_original:
        return
    compared = verify(compiled, request, late.in_force().shared, bounds, keeps_nan=keeps_nan)
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


def _raise_pass_error(error: BaseException) -> None:
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


def _failed(name: str, error: BaseException, notes: Notes, seconds: float) -> Attempt:
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
        message=_said(error, reason),
        seconds=seconds,
        coverage=notes.coverage,
        engine=notes.engine,
        error_type=kind,
        traceback=said,
    )


def _said(error: BaseException, reason: Reason) -> str:
    """What the record says of an error; where data decide, one line of the five that torch has."""
    said = text_of(error)
    if reason is not Reason.DYNAMIC_SHAPE or isinstance(error, Refusal):
        return said
    places = re.findall(r'File "([^"]+)", line (\d+).*\n *(.*)', said)
    where = [f" at {path}:{number}: {code}" for path, number, code in places[-1:]]
    return f"it needs a number that only the data tell: {first_line(said)}{''.join(where)}"


def classify(error: BaseException) -> tuple[Status, Reason]:
    """The status and the reason code of an exception that ended an attempt."""
    if isinstance(error, Refusal):
        return error.status, error.reason
    chained = tuple(causes(error))
    if any(map(lacks_memory, chained)):
        return Status.FAILED, Reason.OUT_OF_MEMORY
    if any(map(_torch.operators.wants_data, chained)):
        return Status.DECLINED, Reason.DYNAMIC_SHAPE
    if any(isinstance(each, ImportError) for each in chained):
        return Status.UNAVAILABLE, Reason.NOT_INSTALLED
    return Status.FAILED, Reason.BUILD_FAILED
