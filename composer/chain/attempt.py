"""One attempt: a candidate is probed, built on a copy of the graph, proven, and verified.

The result is a record (:class:`~composer.records.Attempt`). :mod:`composer.chain.walk` decides
which candidate is tried next, and which one serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch.fx

from composer import _torch, session
from composer.backends.base import Backend, Dialect
from composer.backends.dynamo import CallableBackend, NamedBackend
from composer.build import (
    Artefacts,
    Build,
    BuildFacts,
    BuildRequest,
    BuildTerms,
    Clock,
    Precision,
    building,
)
from composer.chain import mixed_precision, sandbox
from composer.chain.candidates import NO_GAIN, ChainEntry
from composer.chain.precision import Narrow, Stays, copy_at_aten, narrow
from composer.chain.select.choice import Tried
from composer.chain.verify import prove, verify
from composer.chain.verify.runs import run as run_on_copies
from composer.chain.verify.trained import requiring_gradients
from composer.errors import PassError, Refusal, causes, first_line, refuse, text_of, without_frames
from composer.graphs import clones, sharing, writes
from composer.graphs.checkpoints import leaving_modes
from composer.graphs.comparison import Bounds
from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.part import Part
from composer.lowering.each import compile_each
from composer.passes.canonical import NotCanonical
from composer.passes.within_aotautograd import LatePasses
from composer.records import BEFORE_AUTOGRAD, Attempt, GraphRequest, Reason, Status, plain
from composer.system import control_flow
from composer.system.memory import lacks_memory


@dataclass
class _UnderWay:
    """One attempt under way. Its other attributes are arguments of :func:`try_candidate`.

    Attributes:
        facts: The facts of the current build.
        precision: The precision that the policy asks for; ``None`` if it asks for none, or if it is
            not known yet.
        wide: In low precision, the places of the products that stay in float32.
    """

    request: GraphRequest
    entry: ChainEntry
    passes: LatePasses
    made: dict[str, object] | None
    facts: BuildFacts
    options: dict[str, Any]
    among_ranks: bool = False
    begins: Callable[[], object] = lambda: None
    precision: Precision | None = None
    wide: tuple[int, ...] = ()


def try_candidate(
    request: GraphRequest,
    entry: ChainEntry,
    passes: LatePasses,
    *,
    made: dict[str, object] | None = None,
    require_working: Callable[[ChainEntry, Fingerprint], None] = lambda entry, of: None,
    among_ranks: bool = False,
    at_run_time: bool = False,
    begins: Callable[[], object] = lambda: None,
) -> Tried:
    """Make one attempt; return its record, and the compiled callable or the error.

    The record of a failed attempt also has the facts that the engine gave before the failure. The
    traceback is in the record and not in the error, because the next candidate needs the memory
    that the frames hold.

    Args:
        request: The graph.
        entry: The candidate.
        passes: The shared passes of the later stages, which run within it.
        made: Results that engines share; ``None`` if nothing is shared.
        require_working: Refuses an engine that does not work with the installed versions.
        among_ranks: True if other ranks of ``torch.distributed`` have to take the same engine.
        at_run_time: True if Dynamo's compile is over. Before that, Dynamo's control-flow exceptions
            are raised.
        begins: Called before each build of the candidate, each of which has its limits for itself.

    Raises:
        KeyboardInterrupt, SystemExit: these, and exceptions of a signal handler, are raised. All
            other exceptions are failures of the candidate.
        PassError: a pass failed, and the policy says ``on_pass_error = "raise"``.
    """
    is_fallback = entry.is_fallback
    started, handled = time.perf_counter(), sys.exception()
    fingerprint = Fingerprint(request, (entry.parts,))
    options = plain(entry.candidate.options)  # an engine may change its own
    facts = BuildFacts()
    under_way = _UnderWay(request, entry, passes, made, facts, options, among_ranks, begins)
    if lacks := _torch.names.off(look=False):
        under_way.facts.extra["torch_lacks"] = lacks
    try:
        with _torch.modes.restored_modes():  # a failed build may leave torch's modes changed
            entry.skip(fingerprint)
            if not is_fallback:
                _decline_forward_mode()
                sharing.decline_shared(request)
            entry.backend.probe(request)
            entry.recall(fingerprint, under_way.facts)
            if not is_built_apart(entry):  # else the sandbox does
                require_working(entry, fingerprint)
            compiled, bounds = _acceptable(under_way, fingerprint)
        accepted = _record(under_way, started)
    except BaseException as error:
        control_flow.pass_on(error)
        if isinstance(error, _torch.dynamo.DYNAMO_CONTROL_FLOW) and not at_run_time:
            raise
        failed = _failed(under_way, error, started)
        _raise_pass_error(error)
        if trouble := entry.learn(fingerprint, failed, error):
            failed = dataclasses.replace(failed, engine=failed.engine | {"failures": trouble})
        return Tried(failed, None, without_frames(error, handled), is_fallback=is_fallback)
    return Tried(
        accepted,
        compiled,
        is_fallback=is_fallback,
        bounds=bounds,
    )


def run_once(tried: Tried, request: GraphRequest) -> Tried:
    """Run an accepted candidate once in a sandbox, with a backward in training."""
    if tried.compiled is None:
        return tried
    try:
        inputs = list(map(_torch.symbols.hint, request.example_inputs))
        run_on_copies(tried.compiled, inputs, request)
    except BaseException as error:  # noqa: BLE001  # becomes a record in the caller
        control_flow.pass_on(error)
        message = f"raised when it was run on the first inputs: {first_line(text_of(error))}"
        failed = tried.attempt.raised(Status.FAILED, Reason.RAISED_AT_RUNTIME, message, error)
        return Tried(failed, None, error, tried.passes)
    return tried


_OFF = (Reason.NUMERIC_MISMATCH, Reason.NON_FINITE)
"""Reasons that may not occur again with a smaller part of the graph in low precision."""


def _acceptable(
    under_way: _UnderWay, fingerprint: Fingerprint
) -> tuple[Callable[..., Any], Bounds | None]:
    """Build and verify the candidate; return its callable, and how far its numbers may be off.

    If its numbers are off, it is built once more with stricter settings, where the policy wants
    that and the engine has such settings.
    """
    known = dict(under_way.facts.extra)
    try:
        return _in_parts(under_way, fingerprint)
    except Refusal as refusal:
        stricter = under_way.entry.stricter if refusal.reason in _OFF else None
        if stricter is None:
            raise
        off = refusal
    known["retried_after"] = first_line(str(off))
    options = stricter.candidate.options
    known["stricter"] = {
        name: value for name, value in options.items() if under_way.options.get(name) != value
    }
    under_way.entry = stricter
    under_way.facts = BuildFacts(extra=known)
    try:
        return _in_parts(under_way, fingerprint)
    except Refusal as error:
        raise off from error  # a failure is remembered by the candidate's own options


def _in_parts(
    under_way: _UnderWay, fingerprint: Fingerprint
) -> tuple[Callable[..., Any], Bounds | None]:
    """Build and verify the candidate, tentatively in low precision.

    Then the largest part of the graph whose numbers hold is computed so. With several ranks it is
    the whole graph or nothing, because ranks might find different parts.
    """
    parts = _parts(under_way, fingerprint)
    part, known = next(parts), dict(under_way.facts.extra)
    deadline = time.perf_counter() + (under_way.entry.limits.timeout or math.inf)
    while True:
        try:
            accepted = _build_and_verify(under_way, part)
        except Refusal as refusal:
            if refusal.reason not in _OFF or time.perf_counter() >= deadline:
                raise
            smaller = next(parts, None)
            if smaller is None:
                raise
            part, under_way.facts = smaller, BuildFacts(extra=dict(known))
        else:
            if part:
                entry = under_way.entry
                found = Part(backend=entry.candidate.name, wide=part)
                session.current().knowledge.learn(found, fingerprint, entry.cache)
            return accepted


def _parts(under_way: _UnderWay, fingerprint: Fingerprint) -> Iterator[tuple[int, ...]]:
    """Yield which products to keep in float32, in the order to try."""
    entry = under_way.entry
    if not entry.tentative or under_way.among_ranks:
        yield ()
        return
    assert entry.low is not None  # a tentative candidate has a low precision, and bounds for it
    assert entry.bounds_at_choice is not None
    if known := session.current().knowledge.recall(Part, fingerprint, entry.cache).fact:
        yield known.wide
    in_order = entry.backend.chooses_precision and entry.low == "bf16"
    int8 = entry.backend.gains_by_int8 or "products"
    rounding = mixed_precision.Rounding(entry.low, entry.bounds_at_choice, in_order, int8)
    yield from mixed_precision.parts(rounding, under_way.request, under_way.passes.shared)


def _build_and_verify(
    under_way: _UnderWay, wide: tuple[int, ...]
) -> tuple[Callable[..., Any], Bounds | None]:
    """Build in the candidate's precision, with the ``wide`` products in fp32, and verify.

    An engine that computes in bf16 because of its own option has to meet the bounds of fp32.
    """
    entry = under_way.entry
    narrowed = _narrowed(under_way, wide)
    if narrowed is None:
        bounds = first = entry.bounds
        compiled = _build_within_limits(under_way, under_way.request, entry.told or "fp32")
    else:
        bounds, first = entry.bounds_in_low, entry.bounds_at_choice
        compiled = narrowed.around(_build_within_limits(under_way, narrowed.request, narrowed.told))
        if entry.low == "int8":
            under_way.facts.keeps_nan = False  # no integer stands for it
    _decline_low_coverage(under_way.facts, entry.min_coverage)
    _verify(compiled, under_way, first)
    is_foreign = isinstance(entry.backend, CallableBackend | NamedBackend)
    if bounds is None and is_foreign and not entry.backend.comes_with_torch:
        compiled = requiring_gradients(compiled, under_way.request.gm)
    return compiled, bounds


def _narrowed(under_way: _UnderWay, wide: tuple[int, ...]) -> Narrow | None:
    """Return the graph rewritten to low precision, if that is still to be done.

    Raises:
        Refusal: ``skipped``, for a tentative candidate where the graph gains nothing from it.
    """
    entry = under_way.entry
    precision = entry.low
    if precision is None or entry.told is not None:
        under_way.precision = entry.precision
        return None
    try:
        if precision == "int8" and not entry.backend.gains_by_int8:
            raise Stays(NO_GAIN)
        marks = entry.backend.chooses_precision and precision == "bf16"
        narrowed = narrow(
            under_way.request,
            precision,
            tentative=entry.tentative,
            marks=marks,
            wide=wide,
            int8=entry.backend.gains_by_int8 or "products",
        )
    except Stays as stays:
        if entry.tentative:
            refuse(Status.SKIPPED, Reason.POLICY, f"not tried in {precision}: {stays}")
        under_way.precision = "fp32"
        under_way.facts.extra[f"not_in_{precision}"] = str(stays)
        return None
    under_way.precision = precision
    under_way.wide = wide
    if precision == "bf16":  # in eight bits the engine itself says how many it has
        under_way.facts.extra["products_in_bf16"] = narrowed.products
    return narrowed


def _decline_forward_mode() -> None:
    """Refuse if tensors may carry tangents of forward-mode AD: an engine would silently drop them.

    AOTAutograd's autograd functions have no rule for tangents; Inductor drops them when it fuses.
    """
    if _torch.modes.is_forward_mode():
        message = "no engine computes the tangents of torch.autograd.forward_ad"
        refuse(Status.DECLINED, Reason.TRAINING_GRAPH, message)


def is_built_apart(entry: ChainEntry) -> bool:
    """Return True if a sandbox has to build the candidate before this process does."""
    return entry.limits.isolate and not entry.in_sandbox


def _build_within_limits(
    under_way: _UnderWay, request: GraphRequest, precision: Precision
) -> Callable[..., Any]:
    entry = under_way.entry
    under_way.begins()
    request = _in_dialect(under_way, request)
    terms = BuildTerms(
        limits=entry.limits,
        precision=precision,
        freeze=entry.freeze,
        late=under_way.passes,
        artefacts=Artefacts(entry.cache.artefacts, under_way.made),
        facts=under_way.facts,
    )
    if is_built_apart(entry) and not (entry.is_fallback or entry.backend.isolates_itself):
        facts = sandbox.build_in_child(request, entry, precision, under_way.passes.shared)
        under_way.facts.extra["isolated"] = facts
        terms = dataclasses.replace(terms, clock=Clock())
    try:
        run = _build(request, entry, terms)
    finally:
        terms.artefacts.made = None  # an engine may keep the terms for later calls
        mistake = terms.facts.drop_mistake()
    # An engine that fails with a wrong fact has failed for its own reason, so this comes after it.
    if mistake:
        raise ValueError(mistake)
    terms.check_end()
    return run


def _in_dialect(under_way: _UnderWay, request: GraphRequest) -> GraphRequest:
    """Return the request with the graph in the dialect that the engine takes.

    Raises:
        Refusal: ``declined``, where there is no such graph.
    """
    wanted, late = under_way.entry.backend.dialect, under_way.passes.shared.late
    if wanted not in (None, *get_args(Dialect)):
        known = ", ".join(map(repr, get_args(Dialect)))
        refuse(Status.FAILED, Reason.BUILD_FAILED, f"its dialect is {wanted!r}, not one of {known}")
    if wanted == "any":
        return request
    if wanted == "aten":
        return request if late else _in_aten(request)
    if late or request.torch_gm is None:
        if wanted is None:  # a function that does not say what it takes may well take ATen
            return request
        is_low = under_way.precision not in (None, "fp32")
        cause = "precision" if is_low else _passes_in_words(under_way)
        message = f"its dialect is torch functions, and the policy's {cause} made a graph of ATen"
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, message)
    if request.torch_gm is not request.gm:
        under_way.facts.extra["dialect"] = "torch, without the passes of the stage aten"
    return dataclasses.replace(request, gm=request.torch_gm)


def _in_aten(request: GraphRequest) -> GraphRequest:
    if request.torch_gm is not request.gm:  # a pass, or the policy's precision, has made it so
        return request
    try:
        return dataclasses.replace(request, gm=copy_at_aten(request), torch_gm=None)
    except NotCanonical as error:
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, f"its dialect is ATen, and {error}")


def _passes_in_words(under_way: _UnderWay) -> str:
    """Return the passes that changed the graph, or that will run in AOTAutograd, in words."""
    shared = under_way.passes.shared
    late = [each.name for each in shared.passes if each.stage not in BEFORE_AUTOGRAD]
    partitioner = ["its partitioner"] if shared.partitioner else []
    return f"passes ({', '.join([*under_way.request.rewritten_by, *late, *partitioner])})"


def _build(request: GraphRequest, entry: ChainEntry, terms: BuildTerms) -> Callable[..., Any]:
    """Build on copies, and check that the build did not write to the model; restore buffers.

    Raises:
        Refusal: ``rejected``, if the build wrote to the model or did nothing; or the engine's own.
    """
    backend = entry.backend
    inputs = list(request.example_inputs)
    if backend.reads_example_inputs:
        inputs = clones.copy_inputs(inputs, keep=request.weights)
    gm, options = clones.clone_graph(request.gm), entry.candidate.options
    build_request = BuildRequest(gm, inputs, request.mode, options, terms)
    left_alone = clones.LeftAlone(request)
    buffers = clones.Buffers(request) if backend.reads_example_inputs else None
    try:
        with _aot_settings(request, backend), building(terms):
            compiled = _compiled(backend, build_request)
    finally:
        moved = buffers is not None and buffers.restore()
    if moved or left_alone.written():
        who = "the backend, or another thread of the program,"
        message = f"{who} wrote to the model's weights or buffers while compiling"
        refuse(Status.REJECTED, Reason.MUTATED_INPUTS, message)
    if entry.is_fallback:
        run = prove.proven(compiled, None)
    else:
        run = sharing.watched(prove.proven(compiled, request.gm), request)
    return run if backend.writes_as_the_graph else leaving_modes(run, request.gm)


def _compiled(backend: Backend, request: BuildRequest) -> object:
    """Return the backend's callable.

    If the backend does not run later passes itself, it compiles each of AOTAutograd's graphs.
    """
    passes = request.terms.late
    if passes is None or not passes.shared.late or backend.runs_shared_passes:
        return _compile(backend, request)

    def compile_part(functional: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile one of AOTAutograd's graphs, and check that the backend did something."""
        gm = clones.clone_graph(functional)
        compiled = _compile(backend, dataclasses.replace(request, gm=gm, example_inputs=inputs))
        return prove.proven(compiled, None if backend.may_return_original else functional)

    return compile_each(request.gm, request.example_inputs, passes, compile_part)


def _compile(backend: Backend, request: BuildRequest) -> object:
    """Build, add the backend's facts to the request's, and return what it compiled."""
    build = backend.build(request)
    if not isinstance(build, Build):
        return build
    if build.facts is not None and build.facts is not request.terms.facts:
        request.terms.facts.add(build.facts)
    return build.compiled


@contextlib.contextmanager
def _aot_settings(request: GraphRequest, backend: Backend) -> Iterator[None]:
    """Set AOTAutograd so that backwards are compiled within the attempt, and are right.

    A backend that runs the shared passes itself controls AOTAutograd, and so knows which buffers
    are donated to a backward. For all other backends no buffers are donated.
    """
    with contextlib.ExitStack() as settings:
        settings.enter_context(_torch.aot.backward_lowering_at_once())
        settings.enter_context(_torch.floats.without_restart(request.gm))
        if not backend.runs_shared_passes:
            settings.enter_context(_torch.aot.without_donated_buffers())
        if request.training and writes.reads_what_it_wrote(request.gm):
            settings.enter_context(_torch.aot.keeping_no_weights_for_free())
        yield


def _verify(compiled: Callable[..., Any], under_way: _UnderWay, bounds: Bounds | None) -> None:
    """Compare with the eager fallback, if the policy asks for it."""
    if bounds is None or under_way.entry.is_fallback:
        return
    compared = verify(compiled, under_way.request, under_way.passes.shared, bounds, under_way.facts)
    if under_way.entry.tentative and not compared:
        message = f"in {under_way.precision} its numbers could not be compared"
        refuse(Status.SKIPPED, Reason.POLICY, message)


def _raise_pass_error(error: BaseException) -> None:
    """Re-raise a pass's error (``on_pass_error="raise"``), which is not a failure of the engine."""
    for cause in causes(error):
        if isinstance(cause, PassError):
            raise cause


def _decline_low_coverage(facts: BuildFacts, least: float) -> None:
    """Refuse an engine that says it takes a smaller share of the work than the policy asks for."""
    if facts.coverage is None or facts.coverage >= least:
        return
    rest = f", not {', '.join(facts.left_to_torch)}" if facts.left_to_torch else ""
    share = f"{facts.coverage:.1%} of the graph's work"
    message = f"the engine takes {share}{rest}; min_coverage is {least:g}"
    refuse(Status.DECLINED, Reason.LOW_COVERAGE, message)


def _record(under_way: _UnderWay, started: float) -> Attempt:
    """Return the record of an attempt as accepted, with its current facts."""
    entry, facts = under_way.entry, under_way.facts
    of_policy = {
        "options": under_way.options,
        "tentative": entry.tentative,
        "precision": under_way.precision,
        "products_in_fp32": len(under_way.wide),
    }
    return Attempt(
        backend=entry.candidate.name,
        status=Status.SUCCEEDED,
        reason=None,
        message="",
        seconds=time.perf_counter() - started,
        coverage=facts.coverage,
        engine={name: value for name, value in of_policy.items() if value} | facts.record(),
        options=under_way.options,
        precision=under_way.precision,
        products_in_fp32=len(under_way.wide),
        tentative=entry.tentative,
    )


def _failed(under_way: _UnderWay, error: BaseException, started: float) -> Attempt:
    """Return the record of an attempt that ``error`` ended."""
    status, reason = classify(error, under_way.entry.backend.packages)
    error_type, lines = _type_and_traceback(error)
    return dataclasses.replace(
        _record(under_way, started),
        status=status,
        reason=reason,
        message=_message(error, reason),
        error_type=error_type,
        traceback=lines,
    )


def _type_and_traceback(error: BaseException) -> tuple[str, str]:
    """Return the class and the traceback of an error, or of the cause if it is a refusal."""
    cause: BaseException | None = error
    if isinstance(error, Refusal):
        if error.error_type or error.traceback:
            return error.error_type, error.traceback
        cause = error.__cause__
    if cause is None:
        return "", ""
    return type(cause).__name__, "".join(traceback.format_exception(cause))


def _message(error: BaseException, reason: Reason) -> str:
    """Return the record's message for an error; torch's text on data dependence is shortened."""
    text = text_of(error)
    if reason is not Reason.DYNAMIC_SHAPE or isinstance(error, Refusal):
        return text
    places = re.findall(r'File "([^"]+)", line (\d+).*\n *(.*)', text)
    where = [f" at {path}:{number}: {code}" for path, number, code in places[-1:]]
    return f"it needs a number that only the data tell: {first_line(text)}{''.join(where)}"


def classify(error: BaseException, packages: Sequence[str]) -> tuple[Status, Reason]:
    """Return the status and the reason code of an exception that ended an attempt.

    Args:
        error: The exception.
        packages: The distributions that the engine consists of.
    """
    if isinstance(error, Refusal):
        return error.status, error.reason
    chained = tuple(causes(error))
    if any(map(lacks_memory, chained)):
        return Status.FAILED, Reason.OUT_OF_MEMORY
    if any(map(_torch.operators.wants_data, chained)):
        return Status.DECLINED, Reason.DYNAMIC_SHAPE
    if any(_lacks_package(each, packages) for each in chained):
        return Status.UNAVAILABLE, Reason.NOT_INSTALLED
    return Status.FAILED, Reason.BUILD_FAILED


def _lacks_package(error: BaseException, packages: Sequence[str]) -> bool:
    """Return True if the top-level module of one of these distributions was not found."""
    modules = [each.replace("-", "_") for each in packages]
    return isinstance(error, ModuleNotFoundError) and error.name in modules
