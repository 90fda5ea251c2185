"""The captured graph made functional by AOTAutograd, with its weights told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch, capture
from composer.errors import refuse
from composer.lowering.weights import can_bind
from composer.records import Reason, Status


@dataclass(frozen=True, slots=True)
class FunctionalGraph:
    """Functional ATen, in inference: no mutation, fake tensors in every node's ``meta["val"]``.

    ``weights`` maps positions among the placeholders to tensors whose values an engine may take
    in; it is empty while grad mode is on, since weights that train do not stay.
    """

    gm: torch.fx.GraphModule
    weights: dict[int, torch.Tensor]


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
    everything = [*_own(gm), *example_inputs]
    offset = len(everything) - len(example_inputs)
    weights = {*range(offset)} | {offset + i for i in capture.weight_positions(gm, example_inputs)}

    def compiler(functional: torch.fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        bindable: dict[int, torch.Tensor] = {}
        if not torch.is_grad_enabled() and len(fakes) == len(everything):
            still = sorted(weights - _torch.mutated_inputs())
            bindable = {i: everything[i] for i in still if can_bind(everything[i])}
        with _torch.unset_fake_temporarily():
            return build(FunctionalGraph(functional, bindable))

    decompositions = _torch.onnx_translator().decompositions
    return _torch.aot_inference(gm, example_inputs, compiler, decompositions)


def _own(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Parameters and buffers that the graph module holds itself, as AOTAutograd lifts them."""
    return [
        *dict(gm.named_parameters(remove_duplicate=False)).values(),
        *dict(gm.named_buffers(remove_duplicate=False)).values(),
    ]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
