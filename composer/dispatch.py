"""From a captured graph to the callable that serves it. Start reading here, at :func:`compose`.

The steps, in order, and the package that each of them lives in:

1. :mod:`composer.graphs` reads what Dynamo captured into a :class:`~composer.records.GraphRequest`;
2. :mod:`composer.policy` finds the policy in force for that graph;
3. :mod:`composer.passes` rewrites the graph, once for all candidates; :mod:`composer.chain.verify`
   holds passes to eager's numbers where they declare to keep them, and the policy asks for it;
4. :mod:`composer.chain.walk` tries the candidates, each in one :mod:`composer.chain.attempt`.
   Engines are in :mod:`composer.backends`; most of them share the ONNX :mod:`composer.lowering`.
   Where the policy asks for it, a candidate is first built in a child process
   (:mod:`composer.chain.sandbox`), compared with eager (:mod:`composer.chain.verify`), and measured
   against the others (:mod:`composer.chain.select`). The :mod:`composer.chain.eager_fallback`
   serves where none is accepted;
5. the record is kept, sent to the sinks and, if needed, warned of (:mod:`composer.telemetry`);
6. :mod:`composer.runtime` stands around every call of the compiled graph, and answers when its
   engine fails at run time.

:mod:`composer.system.disk` keeps on disk what later processes can use.
:mod:`composer.runtime.saved` is what torch writes to a file when it saves a compiled function.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch.fx

from composer import _torch, session
from composer.backends import installed_for
from composer.chain import lock, minifier, ranks, repro, select, verify, walk
from composer.chain.candidates import ChainEntry, finders_for
from composer.chain.eager_fallback import EagerFallback
from composer.chain.select import choice
from composer.errors import first_line
from composer.graphs import capture, clones, keys
from composer.policy import Facts
from composer.policy.resolution import Resolved, resolve
from composer.records import CompileReport, End, GraphRequest, Outcome, PassRecord
from composer.runtime import background, backward, calls, ranges, saved
from composer.runtime.graph_record import GraphRecord
from composer.runtime.successors import Successors
from composer.telemetry import notices


def compose(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph with a candidate of the chain: the first accepted, or the fastest.

    This is the backend that ``torch.compile(model, backend="composer")`` calls for every graph.

    Args:
        gm: The graph as Dynamo captured it; neither it nor ``example_inputs`` is changed.
        example_inputs: Tensors and symbols of the first call, in the order of the placeholders.
        mode: ``torch.compile``'s mode.
        options: ``torch.compile``'s options: fields of :class:`composer.Policy`.
        name: ``torch.compile``'s name (torch 2.15). It is the model's name where ``options`` gives
            none.

    Returns:
        A callable that takes the graph's inputs and returns its outputs. Where torch is about to
        save the compiled function to a file, one that can be saved.

    Raises:
        OptionError, UnknownNameError: the user's own mistakes.
        LockError: the policy is ``locked``, and the graph is not as ``composer.lock`` has it.
        PassError: a pass failed and ``on_pass_error`` is ``"raise"``.
        CandidateError: a candidate was not accepted and ``strict`` is on.
        ChainExhausted: none was accepted and ``on_exhausted`` is ``"raise"``.
    """
    if name is not None:
        options = {"model": name, **(options or {})}
    if not _torch.files.will_be_saved():
        return serve(gm, example_inputs, mode, options)
    with _torch.files.not_saving():
        served = serve(gm, example_inputs, mode, options)
    return saved.Saved.of(gm, served, serve, mode, options)


def serve(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """Compile one graph: policy, passes, candidates, record, and the checks around each call.

    :func:`compose` calls it, and a function that was loaded from a file does so at its first call.

    Args:
        gm: As for :func:`compose`.
        example_inputs: As for :func:`compose`.
        mode: As for :func:`compose`.
        options: As for :func:`compose`, with the model's name among them.

    Returns:
        A callable that takes the graph's inputs and returns its outputs.
    """
    started = time.perf_counter()
    _torch.symbols.learn_sizes(gm, example_inputs)
    _torch.modes.compile_anew_in_forward_mode()
    gm, example_inputs, flatten = clones.flat_inputs(gm, example_inputs)
    flatten = flatten or clones.with_captured_dtypes(gm, example_inputs)
    gm, restore = clones.flat_outputs(gm)
    case = _prepare(capture.read_request(gm, example_inputs, mode=mode), options)
    eager = EagerFallback(case.request, case.resolved.shared)
    waits = background.is_asked(case.request, case.resolved)
    with backward.watched() as backwards:
        outcome = _pending(case, eager) if waits else _walk(case, eager)
    kept = repro.Kept.of(case.request, case.resolved)
    report = _publish(case, outcome, kept, time.perf_counter() - started)
    named = case.resolved.names_chain
    record = GraphRecord(report, case.rewritten, kept.noted, asked_by_name=named)
    successors = Successors(
        request=case.request,
        resolved=case.resolved,
        eager=eager,
        record=record,
    )
    served = successors.served(outcome, backwards, selects=waits)
    call, free = ranges.around(served, successors, is_pending=waits)
    run = calls.watch(call, free, flatten, restore)
    return _torch.minifier.for_minifier(run, gm)


def _note_without_graph(found: _torch.breaks.Uncaptured) -> None:
    """Remember what was compiled through composer, and for which Dynamo will not call it."""
    if getattr(found.backend, "func", found.backend) is compose:
        session.current().note(capture.without_graph(found))


_torch.breaks.when_uncaptured(_note_without_graph)
_torch.minifier.begin_scripts_with(minifier.preamble, "composer")


@dataclass(frozen=True, slots=True)
class _Case:
    """One graph, ready for the candidates.

    Attributes:
        request: The graph, as the passes of the stages ``torch`` and ``aten`` left it.
        resolved: The policy to follow, narrowed by the lock if there is one, with its candidates
            and passes. The passes of the later stages are still to run. A pass that was found not
            to keep numbers, as it declares, is not among them.
        rewritten: Records of the passes that have run.
    """

    request: GraphRequest
    resolved: Resolved
    rewritten: tuple[PassRecord, ...]


def _prepare(request: GraphRequest, options: Mapping[str, Any] | None) -> _Case:
    """Resolve the policy for a graph, and run the passes that come before every candidate."""
    here = session.current()
    mode = request.mode
    facts = Facts.of(request)
    resolved = resolve(facts, finders_for(request), mode, options, here.configured)
    policy = resolved.policy
    if resolved.builds_apart:
        _torch.floats.specialize_floats(request.gm)
    request = keys.with_key(request, policy.model, resolved.shared.key, f"{mode} {policy.key}")
    request = dataclasses.replace(request, number=next(here.numbers))
    resolved = lock.hold(request, resolved)
    with here.progress.step(request, "shared passes"):
        bounds = policy.verify.bounds if policy.verify.when != "off" else None
        request, shared, rewritten = verify.rewrite(request, resolved.shared, bounds)
    return _Case(request, dataclasses.replace(resolved, shared=shared), rewritten)


def _pending(case: _Case, eager: EagerFallback) -> Outcome:
    """Leave the choice to the background. Eager serves until then."""
    return background.pending(case.resolved.entries, choice.fallback_of(*eager.made(case.request)))


def _walk(case: _Case, eager: EagerFallback) -> Outcome:
    """Try the candidates."""
    resolved = case.resolved
    within = resolved.distributed.timeout

    def walk_chain(entries: Sequence[ChainEntry]) -> Outcome:
        return walk.walk(
            case.request,
            entries,
            eager,
            benchmark=select.Benchmark.of(resolved.policy, resolved.cache),
            strict=resolved.policy.strict,
            among_ranks=ranks.are_asked(within),
        )

    key = case.request.key_among_ranks
    return ranks.walk_together(key, resolved.entries, within, walk_chain)


def _publish(case: _Case, outcome: Outcome, kept: repro.Kept, seconds: float) -> CompileReport:
    """Keep the record and give it to the sinks; then raise or warn, as the policy has it."""
    policy, here = case.resolved.policy, session.current()
    errors = (each.error for each in outcome.ends)
    ends = tuple(map(End, kept.noted(outcome.attempts), errors))
    outcome = dataclasses.replace(outcome, ends=ends)
    objection = walk.objection(
        outcome,
        strict=policy.strict,
        on_exhausted=policy.on_exhausted,
        shows_faults=bool(_torch.minifier.minifier_looks_for()),
    )
    report = _report(case, outcome, "" if objection else outcome.chosen, seconds)
    report = dataclasses.replace(report, dumped=kept.dumped)
    here.keep(report)
    here.late_compiles.follow(report)
    here.note_captured(case.request.names[0])
    if policy.select.by == "first" and not case.resolved.names_chain:
        here.note_installed(installed_for(case.request))
    here.sinks.emit(report)
    notices.warn_of_environment()
    notices.warn_of_mistake(case.resolved.disregarded)
    if objection:
        raise objection
    notices.warn_of_lock(report)
    notices.warn_of_fallbacks(report, asked_by_name=case.resolved.names_chain)
    notices.warn_of_passes(report)
    notices.warn_of_late_compile(report)
    return report


def _report(case: _Case, outcome: Outcome, chosen: str, seconds: float) -> CompileReport:
    request = case.request
    waited, reason = _torch.dynamo.under_way()
    return CompileReport(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        number=request.number,
        graph_id=request.graph_id,
        graph_key=request.graph_key,
        model=request.model,
        device=request.device,
        dtype=request.dtype,
        training=request.training,
        dynamic=request.dynamic,
        nodes=request.nodes,
        inputs=request.inputs,
        policy=case.resolved.layers,
        passes=(*case.rewritten, *outcome.passes),
        attempts=outcome.attempts,
        chosen=chosen,
        seconds=seconds,
        waited=waited,
        recompiled=first_line(reason),
        lock=case.resolved.lock,
        late=session.current().late_compiles.judge(request.graph_id, request.model),
    )
