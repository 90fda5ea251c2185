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
    is_inexact,
    name_of_gradient,
    requires_grad,
)
from composer.graphs.nodes import graph_modules, value_of
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
        copied: The result of :func:`copy_for_run`, if the caller has it already.

    Raises:
        Refusal: the function returned no tuple or list.
        TypeError: the graph would write to an input that cannot be copied.
    """
    stand_ins, copies = copied or copy_for_run(inputs, request)
    passed = changeable(stand_ins, request)
    buffers, left_alone = clones.Buffers(request), clones.LeftAlone(request)
    apart = torch.random.fork_rng(devices=devices(inputs))
    with _torch.fakes.unset_fake_temporarily(), _torch.modes.without_save_hooks(), apart:
        before = generator_state(inputs)
        try:
            outputs = named_outputs(function(*stand_ins))
            found = outputs | _gradients(outputs, copies, request) | passed
            values = {name: detached_copy(value) for name, value in found.items()}
        finally:
            buffers.restore()
        generator = generator_state(inputs)
    before_run = changeable(inputs, request)
    pairs = itertools.combinations(_tensors(outputs).items(), 2)
    joined = ((name, other) for (name, one), (other, another) in pairs if one is another)
    kept = frozenset(name for name in passed if same_values(values[name], before_run[name]))
    return Run(
        values=values,
        strides=strides_of(outputs),
        kept=kept,
        generator=generator,
        random=not torch.equal(before, generator),
        rounded_to=_rounded_to(request),
        wrote_to_weights=left_alone.written(),
        joined=frozenset(joined),
    )


def _tensors(outputs: Values) -> dict[str, torch.Tensor]:
    return {name: each for name, each in outputs.items() if isinstance(each, torch.Tensor)}


def _rounded_to(request: GraphRequest) -> torch.dtype | None:
    """Return the coarsest dtype of the graph's values and of autocast around or within it."""
    found: set[torch.dtype | None] = {dtype for _, dtype in _torch.modes.autocasts()}
    nodes = itertools.chain.from_iterable(each.graph.nodes for each in graph_modules(request.gm))
    for node in nodes:
        found.add(_torch.modes.autocast_dtype(node))
        value = value_of(node)
        if isinstance(value, torch.Tensor):
            found.add(value.dtype)
    return next(filter(found.__contains__, _COARSE), None)


def copy_for_run(inputs: Sequence[Any], request: GraphRequest) -> tuple[list[Any], list[Any]]:
    """Return inputs that stand in for the graph's own, and the copies that they are made of.

    The copies are leaves for autograd. If an input is not a leaf, its stand-in is computed from the
    copy. Weights are not copied, except buffers in which autograd would record the run.

    Raises:
        TypeError: the graph would write to an input that cannot be copied.
    """
    copies = clones.copy_inputs(inputs, keep=request.weights - _recording(inputs, request))
    _refuse_to_write(copies, inputs, request)
    return list(map(as_deep, copies, inputs)), copies


def _refuse_to_write(copies: Sequence[Any], inputs: Sequence[Any], request: GraphRequest) -> None:
    """Raise TypeError if the graph writes to an input that was not copied: a tensor subclass.

    Weights are exempt, since they are restored after a run.
    """
    for i in sorted(writes.assigned_inputs(request.gm) - request.weights):
        kind = type(inputs[i])
        if copies[i] is inputs[i] and issubclass(kind, torch.Tensor):
            message = f"input {i}, a {kind.__name__} that the graph writes to, cannot be copied"
            raise TypeError(message)


def _recording(inputs: Sequence[Any], request: GraphRequest) -> frozenset[int]:
    """Return the positions of the weights through which autograd would reach the program's graph.

    The values of a buffer that the graph writes to can be restored after a run, but its autograd
    history cannot: the program's own backward would go through that run. A module may also hold
    what was computed from its parameters, such as a hidden state. A backward of the run would free
    how that was computed. So these are copied.
    """
    if not torch.is_grad_enabled():
        return frozenset()
    computed = {i for i in request.weights if requires_grad(inputs[i]) and not inputs[i].is_leaf}
    written = writes.assigned_inputs(request.gm) & request.weights
    buffers = written - writes.written_parameters(request)
    return frozenset(i for i in buffers if is_inexact(inputs[i])) | computed


def as_deep(copy: Any, original: Any) -> Any:
    """Return a copy that is no leaf if the original is none; autograd forbids writes to leaves."""
    if requires_grad(original) and not original.is_leaf:
        return clones.not_leaf(copy)
    return copy


def named_outputs(returned: Any) -> Values:
    """Return the outputs of a graph by name.

    Raises:
        Refusal: ``returned`` is not a tuple or a list.
    """
    leaves, _ = _torch.tensors.flatten(outputs_of(returned))
    return {f"output {i}": each for i, each in enumerate(leaves)}


def _gradients(outputs: Values, copies: Sequence[Any], request: GraphRequest) -> Values:
    """Return the gradients of the inputs and of the graph's own parameters, by name, in training.

    For a state that the graph writes to and that no output depends on, eager has no gradient, but
    AOTAutograd gives zeros. Such a missing gradient is therefore replaced by zeros.
    """
    if not request.training:
        return {}
    passed = {f"input {i}": each for i, each in enumerate(copies)}
    held = {f"weight {name}": each for name, each in request.gm.named_parameters()}
    found = gradients(outputs, passed | held, _torch.modes.own_backward)
    for i in writes.assigned_inputs(request.gm) - writes.written_parameters(request):
        name = name_of_gradient(f"input {i}")
        if name in found and found[name] is None:
            found[name] = torch.zeros_like(copies[i])
    return found


def changeable(inputs: Sequence[Any], request: GraphRequest) -> Values:
    """Return the inputs and the graph's own tensors that a run may write to, by name."""
    written = writes.written_parameters(request)
    found: Values = {}
    for i, value in enumerate(inputs):
        is_parameter = isinstance(value, torch.nn.Parameter)
        if i in written or (isinstance(value, torch.Tensor) and not is_parameter):
            found[f"input {i} afterwards"] = value
    for i, tensor in enumerate(writes.written_attributes(request.gm)):
        found[f"held tensor {i} afterwards"] = tensor
    return found


def strides_of(outputs: Values) -> dict[str, tuple[int, ...]]:
    """Return the strides of the outputs that have some, by name."""
    tensors = _tensors(outputs).items()
    return {name: each.stride() for name, each in tensors if each.layout is torch.strided}


def generator_state(inputs: Sequence[Any]) -> torch.Tensor:
    """Return the state of the CPU's random generator and of those of the inputs' devices."""
    states = map(torch.cuda.get_rng_state, devices(inputs))
    return torch.cat([torch.get_rng_state(), *states])
