"""Makes a captured graph functional with AOTAutograd: a forward, backward or inference graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.build import BuildTerms
from composer.errors import refuse
from composer.graphs import capture, checkpoints, clones
from composer.graphs.comparison import requires_grad
from composer.graphs.nodes import are_static, value_of
from composer.lowering.decompositions import decompositions
from composer.lowering.devices import devices_of
from composer.lowering.export.vocabulary import vocabulary
from composer.lowering.operators.entry import Operators
from composer.lowering.weights import samples
from composer.lowering.weights.statistics import (
    find_witnesses,
    is_statistic_of,
    may_be_statistic,
    statistics,
    witness_of,
)
from composer.lowering.weights.watchable import watchable
from composer.passes.within_aotautograd import LatePasses
from composer.records import Reason, Stage, Status

_CPU = torch.device("cpu")

Expected = tuple[tuple[int | None, ...], torch.dtype]
"""The sizes and the dtype of an output. A size is ``None`` where torch knows no value of it."""


class GraphKind(StrEnum):
    """The kinds of graphs that AOTAutograd makes."""

    INFERENCE = "inference"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class FunctionalGraph:
    """A graph of functional ATen operators, without mutation.

    Every node has fake tensors in ``meta["val"]``.

    Attributes:
        gm: The graph.
        kind: Which of AOTAutograd's graphs it is.
        weights: Tensors whose values an engine may take in, by position among the placeholders.
            Empty while grad mode is on, since weights change in training, and under the policy's
            ``freeze = false``.
        witnesses: For some of these positions, a tensor whose version rises when the weight is
            written to without raising its own version
            (:mod:`composer.lowering.weights.statistics`).
        example_args: The real arguments of the first call; ``None`` for a backward, and where
            AOTAutograd removed or added arguments.
        expected: Sizes and dtype of each output in the first call; ``None`` for outputs that are
            not tensors.
        statistics: Positions of placeholders that are running statistics of a batch norm; the value
            is True if only the batch norm's own forward reads them.
        device: The device of the captured graph's inputs; the CPU if it has no inputs.
        written: Position of each output that is the new value of an input, mapped to the input's.
            The output is copied to the input after the call. Filled for inference graphs only, and
            only where AOTAutograd removed or added no inputs.
    """

    gm: torch.fx.GraphModule
    kind: GraphKind
    weights: dict[int, torch.Tensor]
    witnesses: dict[int, torch.Tensor]
    example_args: tuple[Any, ...] | None
    expected: tuple[Expected | None, ...]
    statistics: Mapping[int, bool] = field(default_factory=dict)
    device: torch.device = _CPU
    written: Mapping[int, int] = field(default_factory=dict)


GraphBuilder = Callable[[FunctionalGraph], Callable[..., Any]]


def compile_functional(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    build: GraphBuilder,
    entries: Operators = MappingProxyType({}),
    terms: BuildTerms | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph: AOTAutograd makes it functional, and ``build`` compiles the result.

    A graph that needs a backward becomes two functional graphs, and any other graph becomes one.
    AOTAutograd's run-time wrapper writes mutated inputs back and makes views of inputs again, so an
    engine sees only pure functions.

    Args:
        gm: The captured graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        build: Compiles a functional graph.
        entries: This engine's entries of operators. They have priority over composer's own.
        terms: The terms of the build; ``freeze`` and the shared passes are read.

    Raises:
        Refusal: ``declined``, for inputs and outputs that are not plain dense tensors.
    """
    terms = terms or BuildTerms()
    vocabulary().learn(terms.artefacts)
    own = own_tensors(gm)
    needs_grad = torch.is_grad_enabled() and any(map(requires_grad, (*own, *example_inputs)))
    # Weights are taken in without a backward only. The gradient of a subclass would be one, too.
    owners = {} if needs_grad else owners_of(gm, example_inputs)
    for i, value in enumerate(example_inputs, len(own)):
        decline_special_tensors(_torch.tensors.inner_tensors(value) if i in owners else [value])
    inputs, owners = _unwrapped([*own, *example_inputs], owners)
    _decline_complex_outputs(gm)
    captured = _Captured(
        inputs,
        owners,
        next(iter(devices_of(example_inputs)), _CPU),
        freezes=terms.freeze is not False,
    )

    def compiler(
        kind: GraphKind, functional: torch.fx.GraphModule, fakes: Sequence[Any]
    ) -> Callable[..., Any]:
        if kind is GraphKind.BACKWARD:
            _torch.aot.donate_nothing()  # engines write to none of their inputs
        graph, unbacked = captured.functional_graph(kind, functional, fakes), _unbacked(fakes)
        plain = _torch.sources.settled_forward(clones.clone_graph(functional)) if unbacked else None
        with _torch.fakes.unset_fake_temporarily():
            compiled = build(graph)
        if plain is not None:
            compiled = _or_of_nothing(compiled, plain, unbacked)
        if kind is GraphKind.BACKWARD:
            compiled = _with_memory(compiled)
        return _torch.aot.boxed(compiled)

    try:
        whole = checkpoints.without_regions(gm)
        table = decompositions(entries, needs_grad)
        return through_aot(whole, example_inputs, compiler, table, terms.late)
    finally:  # AOTAutograd keeps the compiler of a training graph alive, with its variables
        captured.inputs.clear()
        captured.owners.clear()


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured graph, of which AOTAutograd makes functional graphs.

    Attributes:
        inputs: AOTAutograd's inputs: the graph's own tensors, and then the example inputs.
        owners: The owner of each weight (:func:`owners_of`).
        device: The device of the graph.
        freezes: True if engines may take in weights.
    """

    inputs: list[Any]
    owners: dict[int, object]
    device: torch.device
    freezes: bool

    def functional_graph(
        self, kind: GraphKind, gm: torch.fx.GraphModule, fakes: Sequence[Any]
    ) -> FunctionalGraph:
        """Return a graph that AOTAutograd made, with all that an engine may know of it."""
        has_all_inputs = kind is not GraphKind.BACKWARD and len(fakes) == len(self.inputs)
        is_whole_inference = kind is GraphKind.INFERENCE and has_all_inputs
        read = statistics(gm)
        unfit = _torch.aot.mutated_inputs() | _dynamic(fakes)
        binds = self.freezes and is_whole_inference and not torch.is_grad_enabled()
        owners = self.owners if binds else {}
        weights, witnesses = bindable(self.inputs, owners, unfit, read)
        return FunctionalGraph(
            gm,
            kind,
            weights,
            witnesses,
            example_args=_example_args(self.inputs, fakes) if has_all_inputs else None,
            expected=_expected(gm),
            statistics=read,
            device=self.device,
            written=_torch.aot.copied_back() if is_whole_inference else {},
        )


Compiler = Callable[[GraphKind, torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def through_aot(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compiler: Compiler,
    decompositions: dict[Any, Callable[..., Any]],
    passes: LatePasses | None = None,
) -> Callable[..., Any]:
    """Run AOTAutograd on a captured graph, with the shared passes of the stages within it.

    Args:
        gm: The captured graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        compiler: Makes a boxed callable from a functional graph and its fake inputs.
        decompositions: Operators to decompose while the graph is made functional.
        passes: The shared passes; ``None`` for none.
    """
    passes = passes or LatePasses()

    def run_all(stage: Stage, functional: torch.fx.GraphModule, *, inference: bool) -> None:
        for last in (False, True):
            passes.run(stage, functional, inference=inference, last=last)

    def compile_one(
        kind: GraphKind, functional: torch.fx.GraphModule, fakes: Sequence[Any]
    ) -> Callable[..., Any]:
        placeholders = functional.graph.find_nodes(op="placeholder")
        for node, fake in zip(placeholders, fakes, strict=True):
            node.meta.setdefault("val", fake)  # AOTAutograd (torch 2.13) leaves out plain numbers
        inference = kind is GraphKind.INFERENCE
        if inference:
            run_all(Stage.JOINT, functional, inference=True)
        run_all(Stage.POST_GRAD, functional, inference=inference)
        if kind is GraphKind.BACKWARD and passes.rewrites(Stage.POST_GRAD):
            rewritten = clones.clone_graph(functional)
            return _torch.backwards.compiled_from(rewritten, compiler(kind, functional, fakes))
        return compiler(kind, functional, fakes)

    def partition(joint: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        run_all(Stage.JOINT, joint, inference=False)
        return passes.partition(_torch.aot.min_cut, joint, inputs, **kwargs)

    return _torch.aot.aot_compile(
        gm,
        example_inputs,
        forward=functools.partial(compile_one, GraphKind.FORWARD),
        backward=functools.partial(compile_one, GraphKind.BACKWARD),
        inference=functools.partial(compile_one, GraphKind.INFERENCE),
        partition=partition,
        decompositions=decompositions,
    )


def _unbacked(fakes: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the inputs that are, or have a size that is, an unbacked symbol."""
    return tuple(i for i, fake in enumerate(fakes) if _has_unbacked_size(fake))


def _has_unbacked_size(value: Any) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(map(_torch.symbols.is_unbacked, sizes))


def _example_args(values: Sequence[Any], fakes: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the arguments of the first call; ``None`` if an engine cannot be tried on them."""
    if any_fake(values):
        return None
    args = tuple(map(_torch.symbols.hint, values))
    return None if _any_empty(args, _unbacked(fakes)) else args


def _or_of_nothing(
    engine: Callable[..., Any], plain: Callable[..., Any], unbacked: Sequence[int]
) -> Callable[..., Any]:
    """Have torch answer the calls in which one of these inputs has no elements.

    Engines differ in what they do with empty tensors, and there is no time to gain. OpenVINO 2026.4
    ends the process (openvinotoolkit/openvino#37966). For a size that is not unbacked, the graph's
    guards tell if it is zero.
    """

    def run(*args: Any) -> Any:
        if _any_empty(args, unbacked):
            return plain(*args)
        return engine(*args)

    return run


def _any_empty(args: Sequence[Any], positions: Sequence[int]) -> bool:
    """True if a tensor at one of these positions has no elements, or a number there is zero."""
    for i in positions:
        value = args[i]
        count = value.numel() if isinstance(value, torch.Tensor) else value
        if not count:
            return True
    return False


def _with_memory(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Write lazily zero or lazily negated gradients to memory before an engine reads them.

    Autograd may pass such tensors to any compiled backward, since no guard looks at gradients
    (pytorch/pytorch#197856).
    """

    def run(*args: Any) -> Any:
        return backward(*map(_in_memory, args))

    return run


def _in_memory(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value._is_zerotensor():
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value.resolve_neg() if value.is_neg() else value


def _decline_complex_outputs(gm: torch.fx.GraphModule) -> None:
    """Refuse a graph with a complex output.

    The gradient of a lazily conjugated output is not what AOTAutograd assumes (torch 2.13).
    """
    (returned,) = gm.graph.find_nodes(op="output")
    for node in returned.all_input_nodes:
        value = value_of(node)
        if isinstance(value, torch.Tensor) and value.dtype.is_complex:
            what = f"one of its outputs is a tensor of {value.dtype}"
            refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, what)


def decline_special_tensors(values: Iterable[Any]) -> None:
    """Refuse tensors that are not plain dense memory, since engines read nothing else.

    Raises:
        Refusal: ``declined`` with ``unsupported_dtype``, for a tensor subclass, a sparse or
            quantized tensor, complex numbers, or a tensor that the program made fake.
    """
    for value in values:
        if _torch.fakes.is_users_fake(value):
            refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, "one of its tensors is fake: no data")
        kind = _special_kind(value) if isinstance(value, torch.Tensor) else ""
        if kind:
            refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, f"one of its tensors is a {kind}")


def _special_kind(value: torch.Tensor) -> str:
    """Return words for a tensor that is not plain dense memory; empty for a plain one.

    The memory of a lazy tensor does not hold its value. The methods of a subclass may do anything,
    so they are not called.
    """
    kind = f"{value.dtype}, {value.layout}"
    if type(value) not in _torch.tensors.PLAIN_TENSORS:
        return f"{type(value).__name__}, {kind}"
    if value.is_neg():
        return f"Tensor, {kind}, negated lazily"
    if value._is_zerotensor():
        return f"Tensor, {kind}, zero without memory"
    is_dense = value.layout is torch.strided and not value.is_quantized
    return "" if is_dense and not value.dtype.is_complex else f"Tensor, {kind}"


def bindable(
    everything: Sequence[Any],
    owners: Mapping[int, object],
    unfit: frozenset[int],
    statistics: Mapping[int, bool],
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Return the weights that an engine may take in, by position, and their witnesses.

    Args:
        everything: The inputs of a functional graph.
        owners: By position of each weight, the module that owns it, if known.
        unfit: Positions of inputs that the graph writes to or whose sizes are dynamic.
        statistics: As in :class:`FunctionalGraph`.

    Returns:
        The weights, and the witnesses of the weights that have one (:class:`FunctionalGraph`).
    """
    weights = watchable({i: everything[i] for i in sorted(owners.keys() - unfit)})
    witnesses: dict[int, torch.Tensor | None] = {}
    orphans: dict[int, torch.Tensor] = {}
    for i, weight in weights.items():
        owner = owners[i]
        if samples.are_compared_whole(weight):
            continue
        if i in statistics or is_statistic_of(owner, weight):  # in a forward written by hand
            witnesses[i] = witness_of(owner) if statistics.get(i, True) else None
        if owner is None and may_be_statistic(weight):
            orphans[i] = weight
    witnesses |= find_witnesses(orphans)
    known = {i: witness for i, witness in witnesses.items() if witness is not None}
    unwatched = witnesses.keys() - known.keys()
    return {i: weight for i, weight in weights.items() if i not in unwatched}, known


def _unwrapped(
    values: Sequence[Any], owners: Mapping[int, object]
) -> tuple[list[Any], dict[int, object]]:
    """Return values with the inner tensors of each weight in its place, and the owners of these.

    A weight of a traceable subclass, such as a quantized one, is made of inner tensors. AOTAutograd
    passes these to a functional graph, in this order.

    Args:
        values: The inputs of a captured graph.
        owners: By position of each weight, the module that owns it, if known.
    """
    inner: list[Any] = []
    inner_owners: dict[int, object] = {}
    for i, value in enumerate(values):
        if i not in owners:
            inner.append(value)
            continue
        for tensor in _torch.tensors.inner_tensors(value):
            inner_owners[len(inner)] = owners[i]
            inner.append(tensor)
    return inner, inner_owners


def _dynamic(fakes: Sequence[Any]) -> frozenset[int]:
    """Return the positions of tensors with a dynamic size."""
    shapes = [getattr(fake, "shape", ()) for fake in fakes]
    return frozenset(i for i, shape in enumerate(shapes) if not are_static(shape))


def any_fake(values: Sequence[Any]) -> bool:
    """True if one of the values is a fake tensor, which has no data."""
    return any(isinstance(value, _torch.fakes.FakeTensor) for value in values)


def _expected(gm: torch.fx.GraphModule) -> tuple[Expected | None, ...]:
    (returned,) = gm.graph.find_nodes(op="output")
    return tuple(map(_expected_of, returned.args[0]))


def _expected_of(output: Any) -> Expected | None:
    value = output.meta["val"] if isinstance(output, torch.fx.Node) else output
    if not isinstance(value, torch.Tensor):
        return None
    sizes = (None if _torch.symbols.is_unbacked(n) else _torch.symbols.hint(n) for n in value.shape)
    return tuple(sizes), value.dtype


def owners_of(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, object]:
    """Return the owner of each weight, if known, by the weight's index in AOTAutograd's inputs."""
    own = _own_members(gm)
    owners: dict[int, object] = {
        i: gm.get_submodule(name.rpartition(".")[0]) for i, (name, _) in enumerate(own)
    }
    placeholders = gm.graph.find_nodes(op="placeholder")
    for i in capture.lasting_weights(gm, example_inputs):
        owners[len(own) + i] = _torch.dynamo.owner_of_buffer(placeholders[i])
    return owners


def own_tensors(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Return the graph module's own parameters and buffers, in the order of AOTAutograd."""
    return [tensor for _, tensor in _own_members(gm)]


def _own_members(gm: torch.fx.GraphModule) -> list[tuple[str, torch.Tensor]]:
    parameters = gm.named_parameters(remove_duplicate=False)
    return [*parameters, *gm.named_buffers(remove_duplicate=False)]
