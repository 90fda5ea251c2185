"""Runs a graph on copies of its inputs, and returns everything that a comparison looks at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.chain.verify.prove import outputs_of
from composer.graphs import clones, writes
from composer.graphs.clones import same_values
from composer.graphs.comparison import (
    Values,
    detached_copy,
    devices,
    gradients,
    name_of_gradient,
)
from composer.graphs.nodes import value_of
from composer.records import GraphRequest

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
