"""The captured graph made functional by AOTAutograd, with its weights told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch, capture
from composer.errors import refuse
from composer.lowering.decompositions import decompositions
from composer.lowering.statistics import statistics, witness_of
from composer.lowering.weights import can_bind
from composer.records import Reason, Status


@dataclass(frozen=True, slots=True)
class FunctionalGraph:
    """Functional ATen, in inference: no mutation, fake tensors in every node's ``meta["val"]``.

    ``weights`` maps positions among the placeholders to tensors whose values an engine may take
    in; it is empty while grad mode is on, since weights that train do not stay. ``witnesses`` maps
    some of these positions to a tensor whose version tells of changes that the weight's own does
    not (:mod:`composer.lowering.statistics`). ``example_args`` are real arguments, those of the
    first call; empty where AOTAutograd took some away or added some. ``expected`` are shape and
    dtype, in that call, of every output that is a tensor, and ``None`` for the others.
    """

    gm: torch.fx.GraphModule
    weights: dict[int, torch.Tensor]
    witnesses: dict[int, torch.Tensor]
    example_args: tuple[Any, ...]
    expected: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


def compile_inference(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    build: Callable[[FunctionalGraph], Callable[..., Any]],
) -> Callable[..., Any]:
    """Have ``build`` compile the functional graph; AOTAutograd does the rest around it.

    Mutated inputs are written back and views of inputs are made anew by AOTAutograd's run-time
    wrapper, so an engine sees only pure functions.

    Raises:
        Refusal: ``declined``, for a graph that needs a backward.
    """
    if torch.is_grad_enabled() and any(_requires_grad(v) for v in (*example_inputs, *_own(gm))):
        refuse(
            Status.DECLINED,
            Reason.TRAINING_GRAPH,
            "the graph needs a backward; under torch.no_grad() it would not",
        )
    owners = _owners(gm, example_inputs)
    everything = [*_own(gm), *example_inputs]

    def compiler(functional: torch.fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        weights: dict[int, torch.Tensor] = {}
        same = len(fakes) == len(everything)
        if not torch.is_grad_enabled() and same:
            still = sorted(owners.keys() - _torch.mutated_inputs())
            weights = {i: everything[i] for i in still if can_bind(everything[i])}
        witnesses = {i: witness_of(owners[i]) for i in weights.keys() & statistics(functional)}
        weights = {i: each for i, each in weights.items() if witnesses.get(i, each) is not None}
        watched = {i: each for i, each in witnesses.items() if each is not None}
        real = tuple(map(_torch.hint, everything)) if same and not _any_fake(everything) else ()
        graph = FunctionalGraph(functional, weights, watched, real, _expected(functional))
        with _torch.unset_fake_temporarily():
            return build(graph)

    return _torch.aot_inference(gm, example_inputs, compiler, decompositions())


def _any_fake(values: Sequence[Any]) -> bool:
    return any(isinstance(value, _torch.FakeTensor) for value in values)


def _expected(gm: torch.fx.GraphModule) -> tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]:
    (returned,) = gm.graph.find_nodes(op="output")
    values = (
        each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in returned.args[0]
    )
    return tuple(
        (tuple(map(_torch.hint, value.shape)), value.dtype)
        if isinstance(value, torch.Tensor)
        else None
        for value in values
    )


def _owners(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, object]:
    """Positions of the weights among AOTAutograd's inputs, and whose buffers they are."""
    own = [*dict(gm.named_parameters(remove_duplicate=False))]
    own += [*dict(gm.named_buffers(remove_duplicate=False))]
    owners: dict[int, object] = {
        i: gm.get_submodule(name.rpartition(".")[0]) for i, name in enumerate(own)
    }
    placeholders = gm.graph.find_nodes(op="placeholder")
    for i in capture.weight_positions(gm, example_inputs):
        owners[len(own) + i] = _torch.owner_of_buffer(placeholders[i])
    return owners


def _own(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Parameters and buffers that the graph module holds itself, as AOTAutograd lifts them."""
    return [
        *dict(gm.named_parameters(remove_duplicate=False)).values(),
        *dict(gm.named_buffers(remove_duplicate=False)).values(),
    ]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
