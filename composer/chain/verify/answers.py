"""Compares a candidate with eager on the first real inputs, before the candidate serves.

:mod:`composer.runtime.sampling` does the same for later calls.

The candidate and eager run on copies of the inputs, from the same random state. The outputs, the
inputs and buffers after the run and, in training, the gradients are compared: their shapes,
dtypes, strides and numbers. If numbers differ too much, a run in float64 decides, as in torch's
own benchmarks (``torch._dynamo.utils.same``). So an engine is not blamed for eager's rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.build import BuildFacts
from composer.chain.eager_fallback import make_fallback
from composer.chain.verify.double import in_double
from composer.chain.verify.prove import outputs_of
from composer.errors import Refusal, error_line, first_line, refuse, text_of
from composer.graphs import clones, collectives, writes
from composer.graphs.clones import same_values
from composer.graphs.comparison import (
    Bounds,
    Errors,
    Mismatch,
    Values,
    detached_copy,
    devices,
    errors_of,
    gradients,
    is_gradient,
    largest_gradient,
    mismatch_of,
    name_of_gradient,
)
from composer.graphs.nodes import value_of
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

_COARSE = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one run of a graph.

    Attributes:
        values: Outputs, gradients, and tensors that the run may have written to, by name.
        strides: The strides of the outputs, by name.
        kept: Names of the values that the run could have written to and did not.
        generator: The state of torch's random generators after the run.
        random: True if the run changed that state.
        rounded_to: The coarsest dtype that numbers were rounded to on the way; ``None`` if the
            graph uses no dtype below float32.
        wrote_to_weights: True if a parameter that the graph does not write to was written to.
        joined: Pairs of outputs that are the same tensor: a write to one changes the other.
    """

    values: Values
    strides: dict[str, tuple[int, ...]]
    kept: frozenset[str]
    generator: torch.Tensor
    random: bool
    rounded_to: torch.dtype | None = None
    wrote_to_weights: bool = False
    joined: frozenset[tuple[str, str]] = frozenset()


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


def run(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    request: GraphRequest,
    copied: tuple[list[Any], list[Any]] | None = None,
) -> Run:
    """Run a graph on copies of its inputs, then restore the buffers and the random state.

    Args:
        function: Takes the graph's inputs and returns its outputs.
        inputs: Real inputs; weights are not copied.
        request: The graph.
        copied: The result of :func:`given_copies`, if the caller has it already.

    Raises:
        Refusal: the function returned no tuple or list.
        TypeError: the graph would write to an input that cannot be copied.
    """
    given, copies = copied or given_copies(inputs, request)
    leaves = {f"input {i}": each for i, each in enumerate(copies)}
    passed = changeable(given, request)
    buffers, left_alone = clones.Buffers(request), clones.LeftAlone(request)
    apart = torch.random.fork_rng(devices=devices(inputs))
    with _torch.fakes.unset_fake_temporarily(), _torch.modes.saving_as_it_is(), apart:
        before = generator_state(inputs)
        try:
            outputs = named_outputs(function(*given))
            wanted = _gradients(outputs, leaves, request) if request.training else {}
            values = {n: detached_copy(each) for n, each in (outputs | wanted | passed).items()}
        finally:
            buffers.restore()
        generator = generator_state(inputs)
    before_run = changeable(inputs, request)
    kept = frozenset(n for n in passed if same_values(values[n], before_run[n]))
    return Run(
        values=values,
        strides=strides_of(outputs),
        kept=kept,
        generator=generator,
        random=not torch.equal(before, generator),
        rounded_to=_rounded_to(request),
        wrote_to_weights=left_alone.written(),
        joined=_joined(outputs),
    )


def _joined(outputs: Values) -> frozenset[tuple[str, str]]:
    tensors = [(name, each) for name, each in outputs.items() if isinstance(each, torch.Tensor)]
    pairs = itertools.combinations(tensors, 2)
    return frozenset((mine, other) for (mine, a), (other, b) in pairs if a is b)


def _rounded_to(request: GraphRequest) -> torch.dtype | None:
    """Return the coarsest dtype of the graph's values and of autocast around or within it."""
    modules = request.gm.modules()
    graphs = (each for each in modules if isinstance(each, torch.fx.GraphModule))
    nodes = [node for each in graphs for node in each.graph.nodes]
    entered = {_torch.modes.autocast_dtype(node) for node in nodes}
    values = (value_of(node) for node in nodes)
    held = {each.dtype for each in values if isinstance(each, torch.Tensor)}
    found = {dtype for _, dtype in _torch.modes.autocasts()} | entered | held
    return next((each for each in _COARSE if each in found), None)


def given_copies(inputs: Sequence[Any], request: GraphRequest) -> tuple[list[Any], list[Any]]:
    """Return inputs that stand in for the graph's own, and the copies that they are made of.

    The copies are leaves for autograd. If an input is not a leaf, its stand-in is computed from the
    copy. Weights are not copied, except buffers in which autograd would record the run.

    Raises:
        TypeError: the graph would write to an input that cannot be copied.
    """
    copies = clones.copy_inputs(inputs, keep=request.weights - _recording(inputs, request))
    _refuse_to_write(copies, inputs, request)
    return [_as_deep(copy, value) for copy, value in zip(copies, inputs, strict=True)], copies


def named_outputs(returned: Any) -> Values:
    """Return the outputs of a graph by name.

    Raises:
        Refusal: ``returned`` is not a tuple or a list.
    """
    return {
        f"output {i}": each
        for i, each in enumerate(_torch.tensors.flatten(outputs_of(returned))[0])
    }


def _gradients(outputs: Values, leaves: Values, request: GraphRequest) -> Values:
    """Return the gradients of the inputs and of the graph's own parameters, by name.

    For a state that the graph writes to and that no output depends on, eager has no gradient, but
    AOTAutograd gives zeros. Such a missing gradient is therefore replaced by zeros.
    """
    held = {f"weight {name}": each for name, each in request.gm.named_parameters()}
    found = gradients(outputs, leaves | held)
    written = writes.assigned_inputs(request.gm) - writes.written_parameters(request)
    states = {name_of_gradient(f"input {i}"): leaves[f"input {i}"] for i in written}
    missing = {n: leaf for n, leaf in states.items() if n in found and found[n] is None}
    return found | {name: torch.zeros_like(leaf) for name, leaf in missing.items()}


def changeable(given: Sequence[Any], request: GraphRequest) -> Values:
    """Return the inputs and the graph's own tensors that a run may write to, by name."""
    written = writes.written_parameters(request)
    held = writes.written_attributes(request.gm)
    passed = ((i, each) for i, each in enumerate(given) if i in written or _may_change(each))
    return {
        **{f"input {i} afterwards": each for i, each in passed},
        **{f"held tensor {i} afterwards": each for i, each in enumerate(held)},
    }


def strides_of(outputs: Values) -> dict[str, tuple[int, ...]]:
    """Strides of the outputs that have some."""
    tensors = {n: each for n, each in outputs.items() if isinstance(each, torch.Tensor)}
    return {n: each.stride() for n, each in tensors.items() if each.layout is torch.strided}


def _recording(inputs: Sequence[Any], request: GraphRequest) -> frozenset[int]:
    """Return the positions of the buffers that the graph writes to in grad mode.

    The values of such a buffer can be restored after a run, but its autograd history cannot: the
    program's own backward would go through that run. So these buffers are copied.
    """
    if not torch.is_grad_enabled():
        return frozenset()
    written = writes.assigned_inputs(request.gm) & request.weights
    return frozenset(i for i in written if _may_change(inputs[i]) and _has_gradients(inputs[i]))


def _has_gradients(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _refuse_to_write(copies: Sequence[Any], inputs: Sequence[Any], request: GraphRequest) -> None:
    """Raise TypeError if the graph writes to an input that was not copied: a tensor subclass.

    Weights are exempt, since they are restored after a run.
    """
    passed = {i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    shared = {i for i in passed - request.weights if copies[i] is inputs[i]}
    for i in sorted(shared & writes.assigned_inputs(request.gm)):
        what = f"input {i}, a {type(inputs[i]).__name__} that the graph writes to, cannot be copied"
        raise TypeError(what)


def _as_deep(copy: Any, value: Any) -> Any:
    """Return a non-leaf copy if the input is not a leaf: autograd refuses to write to leaves."""
    if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
        return clones.not_leaf(copy)
    return copy


def _may_change(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def generator_state(inputs: Sequence[Any]) -> torch.Tensor:
    """Return the state of the CPU's random generator and of those of the inputs' devices."""
    states = [torch.cuda.get_rng_state(device) for device in devices(inputs)]
    return torch.cat([torch.get_rng_state(), *states])


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
