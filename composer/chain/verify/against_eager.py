"""Compares a candidate with eager on the first real inputs, before the candidate serves.

:mod:`composer.runtime.sampling` does the same for later calls.

The candidate and eager run on copies of the inputs, from the same random state. The outputs, the
inputs and buffers after the run and, in training, the gradients are compared: their shapes,
dtypes, strides and numbers. If numbers differ too much, a run in float64 decides, as in torch's
own benchmarks (``torch._dynamo.utils.same``). So an engine is not blamed for eager's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer import _torch
from composer.build import BuildFacts
from composer.chain.eager_fallback import make_fallback
from composer.chain.verify.double import in_double
from composer.chain.verify.runs import Run, given_copies, run
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
from composer.records import GraphRequest, Reason, Status
from composer.system import control_flow

_REASONS = {
    Mismatch.STRUCTURE: Reason.OUTPUT_MISMATCH,
    Mismatch.NON_FINITE: Reason.NON_FINITE,
    Mismatch.NUMBERS: Reason.NUMERIC_MISMATCH,
}


WROTE_TO_WEIGHTS = (
    "it, or another thread of the program, wrote to the model's weights as it was run"
)


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
    inputs = [_torch.symbols.hint(value) for value in request.example_inputs]
    if any(isinstance(value, _torch.fakes.FakeTensor) for value in inputs):
        facts.extra["verified"] = "no: the graph was compiled without real inputs"
        return False
    if collectives.meets_other_ranks(request.gm):
        others = "no: other ranks would have to run the graph's collectives as well"
        facts.extra["verified"] = others
        return False
    fallback, later = make_fallback(request, shared)
    eager = _run_of_eager(fallback, inputs, request, facts)
    if eager is None:
        return False
    try:
        got = run(compiled, inputs, request)
    except Refusal:
        raise
    except BaseException as error:
        control_flow.pass_on(error)
        what = f"raised when it was run on the first inputs: {first_line(text_of(error))}"
        raise Refusal(Status.FAILED, Reason.RAISED_AT_RUNTIME, what) from error
    changed = (*request.rewritten_by, *(each.name for each in later if each.changed))
    uncompared = tuple(each for each in changed if each not in request.compared_passes)
    reference = Reference(bool(changed), uncompared)

    def in_float64() -> Values:
        return exact(inputs, request, shared, facts)

    all_compared = judge(got, eager, in_float64, bounds, reference, facts)
    if facts.keeps_nan and not eager.random:
        _compare_nans(compiled, fallback, inputs, request)
    return all_compared


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
    wrong = [each if i in request.weights else _with_nan(each) for i, each in enumerate(inputs)]
    if all(mine is given for mine, given in zip(wrong, inputs, strict=True)):
        return  # token ids, say
    try:
        expected = run(fallback, wrong, request).values
    except BaseException as error:  # noqa: BLE001  # eager does not take such inputs
        control_flow.pass_on(error)
        return
    found = run(compiled, wrong, request).values
    for name, theirs in expected.items():
        mine = found.get(name)
        if not isinstance(mine, torch.Tensor) or not mine.is_floating_point():
            continue
        hidden = int((theirs.isnan() & ~mine.isnan()).sum())
        if name.startswith("output") and hidden:
            what = f"{name} has numbers for {hidden} elements that are NaN where an input is NaN"
            refuse(Status.REJECTED, Reason.NON_FINITE, what)


def _with_nan(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    copy = value.detach().clone()
    copy[(0,) * copy.dim()] = math.nan
    return copy.requires_grad_(value.requires_grad)


def _run_of_eager(
    reference: Callable[..., Any],
    inputs: Sequence[Any],
    request: GraphRequest,
    facts: BuildFacts,
) -> Run | None:
    """Return eager's run; ``None``, with the reason in the facts, if there is none to compare."""
    try:
        copied = given_copies(inputs, request)
    except BaseException as error:  # noqa: BLE001  # recorded: what serves needs no copies
        control_flow.pass_on(error)
        facts.extra["verified"] = f"no: inputs cannot be copied: {error_line(error)}"
        return None
    try:
        return run(reference, inputs, request, copied)
    except BaseException as error:  # noqa: BLE001  # eager's own error is the user's to see at the call
        control_flow.pass_on(error)
        facts.extra["verified"] = f"no: eager itself raises {error_line(error)}"
        return None


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


_NOTHING = 1e-10
"""A gradient counts as cancelled if it is at most this share of the largest one, in float64."""

_FURTHER = 10.0
"""Eager's rounding error is assumed to be at most this many times the bounds of an engine."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The description of the graph that a candidate is compared with.

    Attributes:
        rewritten: True if shared passes have changed the captured graph.
        by: The passes among them whose result was not compared with the graph before them.
    """

    rewritten: bool = False
    by: tuple[str, ...] = ()

    def said(self, *, in_float64: bool) -> dict[str, str]:
        """Return the entries of the record that name the graph compared with."""
        if not self.rewritten:
            return {"against": "float64" if in_float64 else "eager"}
        how = f"not compared with eager: {', '.join(self.by)} may change numbers"
        return {
            "against": f"the rewritten graph{' in float64' if in_float64 else ''}",
            "rewritten_graph": how if self.by else "compared with eager",
        }


def judge(
    got: Run,
    eager: Run,
    exact: Callable[[], Values],
    bounds: Bounds,
    reference: Reference = Reference(),  # it is frozen
    facts: BuildFacts | None = None,
) -> bool:
    """Refuse the candidate, or add its errors to the facts.

    A candidate may draw other random numbers than eager. It did so if it leaves torch's generator
    in another state. On a GPU the state does not tell, because every kernel that draws advances the
    generator by the same few steps. In both cases only structure and finiteness have to agree.

    Args:
        got: The candidate's run.
        eager: Eager's run.
        exact: Makes the values in float64. It is called only if they have to decide.
        bounds: How far numbers may be off.
        reference: The graph that eager has run.
        facts: The facts of the attempt; ``None`` outside of an attempt.

    Returns:
        True if all numbers were compared.

    Raises:
        Refusal: as for :func:`verify`.
    """
    if got.wrote_to_weights and not eager.wrote_to_weights:
        refuse(Status.REJECTED, Reason.MUTATED_INPUTS, WROTE_TO_WEIGHTS)
    if list(got.values) != list(eager.values):
        what = f"gives {len(got.values)} values where eager gives {len(eager.values)}"
        refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, what)
    if joined := sorted(got.joined - eager.joined):
        what = f"{' and '.join(joined[0])} are one tensor, and two in eager"
        refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, what)
    moved = not torch.equal(got.generator, eager.generator)
    free = eager.random and (moved or _on_gpu(eager.values))
    in_float64: Values | None = None
    unlike = False
    for name in sorted(eager.values, key=lambda name: name not in eager.kept):
        mine, expected, kept = got.values[name], eager.values[name], name in eager.kept
        found = _stride_mismatch(name, got, eager) or mismatch_of(mine, expected, None, bounds)
        if found and found[0] is Mismatch.NUMBERS and free and not kept:
            unlike, found = True, None
        if found and found[0] is Mismatch.NUMBERS:
            in_float64 = _reference(exact, eager, bounds) if in_float64 is None else in_float64
            largest = largest_gradient(eager.values) if is_gradient(name) else 0.0
            found = mismatch_of(mine, expected, in_float64.get(name), bounds, largest)
        if found:
            _refuse(name, *found, kept=kept)
    if facts is not None:
        errors = [errors_of(got.values[name], expected) for name, expected in eager.values.items()]
        said = reference.said(in_float64=bool(in_float64))
        facts.extra["verified"] = _summary(errors, said, unlike=unlike)
    return not unlike


def _on_gpu(values: Values) -> bool:
    return bool(devices(values.values()))


def _reference(exact: Callable[[], Values], eager: Run, bounds: Bounds) -> Values:
    """Return the values in float64; nothing if they come from other random numbers.

    From the same state, torch's generator draws other numbers in float64 than in float32 (torch
    2.13). Some operators, such as ``normal_``, cannot be made to draw in float32 here. If eager is
    further from float64 than rounding alone explains, the random numbers were different.
    """
    found = exact()
    if not eager.random:
        return found
    largest = largest_gradient(eager.values)
    others = (
        _is_other(
            *(value, found.get(name), bounds),
            rounded_to=eager.rounded_to,
            largest=largest if is_gradient(name) else 0.0,
        )
        for name, value in eager.values.items()
    )
    return {} if any(others) else found


def _is_other(
    eagers: Any, exact: Any, bounds: Bounds, *, rounded_to: torch.dtype | None, largest: float
) -> bool:
    if not isinstance(eagers, torch.Tensor) or not isinstance(exact, torch.Tensor):
        return False
    if not eagers.is_floating_point() or eagers.layout is not torch.strided:
        return False
    if eagers.shape != exact.shape:
        return True
    if not exact.numel():
        return False
    if largest and exact.abs().max() <= _NOTHING * largest:
        return False  # it cancels: eager's value is only rounding error, whatever was drawn
    allowed = bounds.allowed(exact.to(torch.float64), rounded_to or eagers.dtype)
    return bool(((eagers - exact).abs() > _FURTHER * allowed).any())


def _stride_mismatch(name: str, got: Run, eager: Run) -> tuple[Mismatch, str] | None:
    """Return a mismatch if strides differ along a dimension of more than one element.

    On a GPU, gaps between rows are accepted: torch only promises the order of strides, and Inductor
    leaves gaps in a product that it padded (from 2 columns to 4 on an H200, torch 2.11).
    """
    value = got.values[name]
    if name not in eager.strides or not isinstance(value, torch.Tensor) or not value.numel():
        return None
    mine, eagers = got.strides.get(name), eager.strides[name]
    if mine is None or len(mine) != len(eagers):
        return None
    sizes = zip(value.shape, mine, eagers, strict=True)
    pairs = [(a, b) for size, a, b in sizes if size != 1]
    if all(a == b for a, b in pairs) or (value.is_cuda and is_padded(value.shape, mine, eagers)):
        return None
    return Mismatch.STRUCTURE, f"has strides {mine}, eager's has {eagers}"


def is_padded(shape: Sequence[int], mine: Sequence[int], eagers: Sequence[int]) -> bool:
    """Return True if strides differ only by gaps between rows: same order, no overlap."""
    triples = zip(mine, eagers, shape, strict=True)
    dims = sorted((each for each in triples if each[2] != 1), key=lambda each: each[1])
    steps = [stride for stride, _, _ in dims]
    rows = all(
        outer >= inner * size for (inner, _, size), outer in zip(dims, steps[1:], strict=False)
    )
    return bool(dims) and dims[0][0] == dims[0][1] > 0 and rows


def _refuse(name: str, mismatch: Mismatch, what: str, *, kept: bool) -> None:
    """Refuse because of one value; ``kept`` is True if eager does not change that value."""
    reason = Reason.MUTATED_INPUTS if kept else _REASONS[mismatch]
    refuse(Status.REJECTED, reason, f"{name} {what}")


def _summary(errors: Sequence[Errors], said: dict[str, str], *, unlike: bool) -> dict[str, Any]:
    """Return the entry of the attempt's record for a candidate that agrees with eager."""
    if unlike:
        drawn = {"against": "structure only: the graph draws random numbers"}
        return {**said, **drawn, "values": len(errors)}
    return {
        **said,
        "values": len(errors),
        "max_absolute_error": max((each.absolute for each in errors), default=0.0),
        "max_relative_error": max((each.relative for each in errors), default=0.0),
        "min_cosine": min((each.cosine for each in errors), default=1.0),
    }
