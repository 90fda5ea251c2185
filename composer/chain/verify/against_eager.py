"""Compares a candidate with eager on the first real inputs, before the candidate serves.

:mod:`composer.runtime.sampling` does the same for later calls.

The candidate and eager run on copies of the inputs, from the same random state. The outputs, the
inputs and buffers after the run and, in training, the gradients are compared: their shapes,
dtypes, strides and numbers. If numbers differ too much, a run in float64 decides, as in torch's
own benchmarks (``torch._dynamo.utils.same``). So an engine is not blamed for eager's rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any

import torch

from composer import _torch
from composer.build import BuildFacts
from composer.chain.eager_fallback import make_fallback
from composer.chain.verify.double import in_double
from composer.chain.verify.runs import Run, copy_for_run, run
from composer.errors import Refusal, error_line, first_line, refuse, text_of
from composer.graphs import collectives
from composer.graphs.comparison import (
    Bounds,
    Errors,
    Mismatch,
    Values,
    devices,
    errors_of,
    is_gradient,
    largest_gradient,
    mismatch_of,
)
from composer.passes.resolve import SharedPasses
from composer.records import GraphRequest, PassRecord, Reason, Status
from composer.system import control_flow

_REASONS = {
    Mismatch.STRUCTURE: Reason.OUTPUT_MISMATCH,
    Mismatch.NON_FINITE: Reason.NON_FINITE,
    Mismatch.NUMBERS: Reason.NUMERIC_MISMATCH,
}

WROTE_TO_WEIGHTS = (
    "it, or another thread of the program, wrote to the model's weights as it was run"
)

_CANCELLED = 1e-10
"""A gradient counts as cancelled if it is at most this share of the largest one, in float64."""

_FURTHER = 10.0
"""Eager's rounding error is assumed to be at most this many times the bounds of an engine."""


class Basis(StrEnum):
    """The values that a candidate's numbers were compared with, as the record calls them."""

    EAGER = "eager"
    FLOAT64 = "float64"
    STRUCTURE = "structure only: the graph draws random numbers"


_IF_REWRITTEN = {
    Basis.EAGER: "the rewritten graph",
    Basis.FLOAT64: "the rewritten graph in float64",
}


def obstacle(request: GraphRequest) -> str:
    """Return why the graph cannot be run on its example inputs here; empty if it can."""
    if any(isinstance(value, _torch.fakes.FakeTensor) for value in request.example_inputs):
        return "the graph was compiled without real inputs"
    if collectives.meets_other_ranks(request.gm):
        return "other ranks would have to run the graph's collectives as well"
    return ""


def verify(
    compiled: Callable[..., Any],
    request: GraphRequest,
    shared: SharedPasses,
    bounds: Bounds,
    facts: BuildFacts,
) -> bool:
    """Run a candidate and eager once each, and compare them.

    The eager fallback also runs in float64, if numbers differ and it has to decide. A candidate
    that claims to give NaN wherever eager does runs a second time, on inputs with a NaN.

    Args:
        compiled: The candidate.
        request: The graph and the first call's inputs, which are not changed.
        shared: The passes of the later stages, which the candidate and the eager fallback have run.
        bounds: How far the candidate's numbers may be off.
        facts: The facts of the attempt. The result is added under ``verified``.

    Returns:
        True if all its numbers were compared.

    Raises:
        Refusal: ``rejected`` with ``output_mismatch``, ``mutated_inputs``, ``non_finite`` or
            ``numeric_mismatch``; ``failed`` with ``raised_at_runtime``.
    """
    if why := obstacle(request):
        facts.extra["verified"] = f"no: {why}"
        return False
    inputs = list(map(_torch.symbols.hint, request.example_inputs))
    fallback, later = make_fallback(request, shared)
    eager = _run_of_eager(fallback, inputs, request, facts)
    if eager is None:
        return False
    candidate = _run_of_candidate(compiled, inputs, request, "the first inputs")

    def in_float64() -> Values:
        return exact(inputs, request, shared, facts)

    basis = judge(candidate, eager, in_float64, bounds)
    facts.extra["verified"] = {
        **_described(basis, request, later),
        "values": len(eager.values),
        **_errors(candidate, eager, basis),
    }
    if facts.keeps_nan and not eager.random:
        _compare_nans(compiled, fallback, inputs, request)
    return basis is not Basis.STRUCTURE


def _run_of_eager(
    fallback: Callable[..., Any],
    inputs: Sequence[Any],
    request: GraphRequest,
    facts: BuildFacts,
) -> Run | None:
    """Return eager's run; ``None``, with the reason in the facts, if there is none to compare."""
    fault = "inputs cannot be copied:"
    try:
        copied = copy_for_run(inputs, request)
        fault = "eager itself raises"  # the user sees that error at the call
        return run(fallback, inputs, request, copied)
    except BaseException as error:  # noqa: BLE001  # recorded
        control_flow.pass_on(error)
        facts.extra["verified"] = f"no: {fault} {error_line(error)}"
        return None


def _run_of_candidate(
    compiled: Callable[..., Any], inputs: Sequence[Any], request: GraphRequest, which: str
) -> Run:
    """Return the candidate's run on ``which`` inputs, and refuse it if it raises."""
    try:
        return run(compiled, inputs, request)
    except Refusal:
        raise
    except BaseException as error:
        control_flow.pass_on(error)
        message = f"raised when it was run on {which}: {first_line(text_of(error))}"
        raise Refusal(Status.FAILED, Reason.RAISED_AT_RUNTIME, message) from error


def _compare_nans(
    compiled: Callable[..., Any],
    fallback: Callable[..., Any],
    inputs: Sequence[Any],
    request: GraphRequest,
) -> None:
    """Refuse a candidate whose outputs have numbers where eager's have NaN.

    Such a candidate would hide a fault of the program. The candidate and eager run with one NaN in
    each floating-point input that is not a weight. If eager raises, nothing is compared.
    """
    # Without a backward: torch's own of grid_sample ends the process at a NaN in the grid (torch
    # 2.13, https://github.com/pytorch/pytorch/issues/24823).
    request = dataclasses.replace(request, training=False)
    activations = set(range(len(inputs))) - request.weights
    receivers = [i for i in activations if _is_floating(inputs[i]) and inputs[i].numel()]
    if not receivers:  # token ids, say
        return
    with_nan = list(inputs)
    for i in receivers:
        with_nan[i] = _with_nan(inputs[i])
    try:
        expected = run(fallback, with_nan, request).values
    except BaseException as error:  # noqa: BLE001  # eager does not take such inputs
        control_flow.pass_on(error)
        return
    found = _run_of_candidate(compiled, with_nan, request, "inputs with a NaN").values
    for name, theirs in expected.items():
        if name.startswith("output"):
            _refuse_hidden_nans(name, found.get(name), theirs)


def _with_nan(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    copy[(slice(1),) * copy.dim()] = math.nan  # the first element, if there is one
    return copy.requires_grad_(tensor.requires_grad)


def _refuse_hidden_nans(name: str, mine: Any, eagers: Any) -> None:
    if not _is_floating(eagers):
        return
    if not _is_floating(mine) or mine.shape != eagers.shape:
        message = f"{name} is not of eager's dtype and shape where an input is NaN"
        refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, message)
    hidden = int((eagers.isnan() & ~mine.isnan()).sum())
    if hidden:
        message = f"{name} has numbers for {hidden} elements that are NaN where an input is NaN"
        refuse(Status.REJECTED, Reason.NON_FINITE, message)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def exact(
    inputs: Sequence[Any],
    request: GraphRequest,
    shared: SharedPasses,
    facts: BuildFacts | None = None,
) -> Values:
    """Return the values of a run of the eager fallback in float64.

    If the graph cannot run in float64, the result is empty and ``facts``, if given, say why.
    """
    try:
        forward, wide, twin = in_double(request, inputs, shared)
        return run(forward, wide, twin).values
    except BaseException as error:  # noqa: BLE001  # recorded: eager is what there is to compare with
        control_flow.pass_on(error)
        if facts is not None:
            facts.extra["in_float64"] = f"no: {error_line(error)}"
        return {}


def judge(candidate: Run, eager: Run, exact: Callable[[], Values], bounds: Bounds) -> Basis:
    """Refuse the candidate if its results are not eager's; else return what decided.

    A candidate may draw other random numbers than eager. It did so if it leaves torch's generator
    in another state. On a GPU the state does not tell, because every kernel that draws advances the
    generator by the same few steps. In both cases only structure and finiteness have to agree.

    Args:
        candidate: The candidate's run.
        eager: Eager's run.
        exact: Makes the values in float64. It is called only if they have to decide.
        bounds: How far numbers may be off.

    Raises:
        Refusal: as for :func:`verify`.
    """
    _compare_as_a_whole(candidate, eager)
    draws_otherwise = _may_draw_otherwise(candidate, eager)
    in_float64: Values | None = None
    basis = Basis.EAGER
    for name in sorted(eager.values, key=lambda name: name not in eager.kept):
        mine, expected, kept = candidate.values[name], eager.values[name], name in eager.kept
        found = _stride_mismatch(name, candidate, eager)
        found = found or mismatch_of(mine, expected, None, bounds)
        if found and found[0] is Mismatch.NUMBERS:
            if draws_otherwise and not kept:
                basis = Basis.STRUCTURE
                continue
            if in_float64 is None:
                in_float64 = _of_same_draws(exact(), eager, bounds)
            largest = largest_gradient(eager.values) if is_gradient(name) else 0.0
            found = mismatch_of(mine, expected, in_float64.get(name), bounds, largest)
        if found:
            mismatch, message = found
            reason = Reason.MUTATED_INPUTS if kept else _REASONS[mismatch]
            refuse(Status.REJECTED, reason, f"{name} {message}")
    return Basis.FLOAT64 if in_float64 and basis is Basis.EAGER else basis


def _compare_as_a_whole(candidate: Run, eager: Run) -> None:
    """Refuse a run that wrote to weights, or has other values than eager or joins two of them."""
    if candidate.wrote_to_weights and not eager.wrote_to_weights:
        refuse(Status.REJECTED, Reason.MUTATED_INPUTS, WROTE_TO_WEIGHTS)
    if list(candidate.values) != list(eager.values):
        missing = [name for name in eager.values if name not in candidate.values]
        counts = f"gives {len(candidate.values)} values where eager gives {len(eager.values)}"
        message = f"{counts}: no {', '.join(missing)}".removesuffix(": no ")
        refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, message)
    if joined := sorted(candidate.joined - eager.joined):
        message = f"{' and '.join(joined[0])} are one tensor, and two in eager"
        refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, message)


def _may_draw_otherwise(candidate: Run, eager: Run) -> bool:
    """Return True if the candidate may have drawn other random numbers than eager."""
    if not eager.random:
        return False
    on_gpu = bool(devices(eager.values.values()))
    return on_gpu or not torch.equal(candidate.generator, eager.generator)


def _of_same_draws(exact: Values, eager: Run, bounds: Bounds) -> Values:
    """Return the values in float64; nothing if they come from other random numbers.

    From the same state, torch draws other numbers in float64 than in float32
    (:mod:`~composer.chain.verify.double`). Some operators, such as ``normal_``, cannot be made to
    draw in float32 here. If eager is further from float64 than rounding alone explains, the random
    numbers were different.
    """
    if not eager.random:
        return exact
    largest = largest_gradient(eager.values)
    for name in eager.values.keys() & exact.keys():
        eagers = eager.values[name]
        cancelled = _CANCELLED * largest if is_gradient(name) else 0.0
        if _is_other_draw(eagers, exact[name], bounds, eager.rounded_to, cancelled):
            return {}
    return exact


def _is_other_draw(
    eagers: Any, exact: Any, bounds: Bounds, rounded_to: torch.dtype | None, cancelled: float
) -> bool:
    """Return True if rounding alone does not explain how far eager's value is from float64.

    Args:
        eagers: The value that eager computed.
        exact: The value in float64.
        bounds: How far an engine's numbers may be off.
        rounded_to: As in :class:`Run`.
        cancelled: The largest number that may be left of a gradient that cancels; 0 for others.
    """
    if not _is_floating(eagers) or not _is_floating(exact):
        return False
    if eagers.layout is not torch.strided:
        return False
    if eagers.shape != exact.shape:
        return True
    if not exact.numel():
        return False
    if cancelled and exact.abs().max() <= cancelled:
        return False  # eager's value is only rounding error, whatever was drawn
    allowed = bounds.allowed(exact.to(torch.float64), rounded_to or eagers.dtype)
    return bool(((eagers - exact).abs() > _FURTHER * allowed).any())


def _stride_mismatch(name: str, candidate: Run, eager: Run) -> tuple[Mismatch, str] | None:
    """Return a mismatch if strides differ along a dimension of more than one element.

    On a GPU, gaps between rows are accepted: Inductor leaves them in a product that it padded (from
    2 columns to 4, torch 2.11; https://github.com/pytorch/pytorch/issues/152520).
    """
    mine, eagers = candidate.strides.get(name), eager.strides.get(name)
    if mine is None or eagers is None or len(mine) != len(eagers):
        return None  # mismatch_of compares the structure
    value = candidate.values[name]
    long = _long_dimensions(value.shape)
    if not value.numel() or all(mine[i] == eagers[i] for i in long):
        return None
    if value.is_cuda and is_padded(value.shape, mine, eagers):
        return None
    return Mismatch.STRUCTURE, f"has strides {mine}, eager's has {eagers}"


def _long_dimensions(shape: Sequence[int]) -> list[int]:
    """Return the dimensions whose stride matters: those of more than one element."""
    return [i for i, size in enumerate(shape) if size != 1]


def is_padded(shape: Sequence[int], mine: Sequence[int], eagers: Sequence[int]) -> bool:
    """Return True if strides differ only by gaps between rows: same order, no overlap."""
    innermost_first = sorted(_long_dimensions(shape), key=lambda i: eagers[i])
    if not innermost_first:
        return False
    innermost = innermost_first[0]
    if mine[innermost] != eagers[innermost] or mine[innermost] <= 0:
        return False
    pairs = itertools.pairwise(innermost_first)
    return all(mine[outer] >= mine[inner] * shape[inner] for inner, outer in pairs)


def _described(basis: Basis, request: GraphRequest, later: Sequence[PassRecord]) -> dict[str, str]:
    """Return the entries of the record that name the graph compared with.

    Its passes are those before autograd, and the later ones, which ran in the eager fallback.
    """
    changed = (*request.rewritten_by, *changing(later))
    if not changed:
        return {"against": basis}
    how = "compared with eager"
    uncompared = [name for name in changed if name not in request.compared_passes]
    if uncompared:
        how = f"not compared with eager: {', '.join(uncompared)} may change numbers"
    return {"against": _IF_REWRITTEN.get(basis, basis), "rewritten_graph": how}


def changing(records: Iterable[PassRecord]) -> tuple[str, ...]:
    """Return the names of the passes that changed a graph."""
    return tuple(each.name for each in records if each.changed)


def _errors(candidate: Run, eager: Run, basis: Basis) -> dict[str, float]:
    """Return the largest errors of all values; nothing if the numbers were not compared."""
    if basis is Basis.STRUCTURE:
        return {}
    pairs = zip(candidate.values.values(), eager.values.values(), strict=True)
    errors = [Errors(), *itertools.starmap(errors_of, pairs)]
    return {
        "max_absolute_error": max(map(operator.attrgetter("absolute"), errors)),
        "max_relative_error": max(map(operator.attrgetter("relative"), errors)),
        "min_cosine": min(map(operator.attrgetter("cosine"), errors)),
    }
