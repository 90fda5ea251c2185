"""The arguments and results of a region, as the native way and the public API need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from composer import _torch
from composer.backends.onnx_engine import OnnxRegion, Output
from composer.graphs import sharing

Run = Callable[[tuple[Any, ...]], list[torch.Tensor]]
"""Runs a session on the arguments of a region, and returns the model's outputs."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The arguments and results of a region, each by its position.

    Attributes:
        names: The model's name of each argument.
        dtypes: The dtype of each argument; ``None`` for an integer.
        types: The ONNX element type (a number) of each input and output, by its name in the model.
        outputs: The description of each result.
        output_names: The model's name of each result.
        device: Where the tensors are.
        is_static: Whether torch can allocate every result before the call.
        rewritten: Maps each result that may be written in place to the argument whose memory it
            gets.
        read: The arguments that are read at each call: neither weights nor constants.
    """

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype | None, ...]
    types: Mapping[str, int]
    outputs: tuple[Output, ...]
    output_names: list[str]
    device: torch.device
    is_static: bool
    rewritten: Mapping[int, int]
    read: tuple[int, ...]

    @staticmethod
    def of(region: OnnxRegion, device: torch.device) -> Ports:
        """The ports of a region."""
        graph, model, dtypes = region.graph, region.graph.model.graph, region.dtypes
        tensors = {i for i, dtype in enumerate(dtypes) if dtype is not None}
        held = {*region.weights, *region.constants}
        is_static = all(None not in (each.shape, each.dtype) for each in graph.outputs)
        return Ports(
            names=graph.inputs,
            dtypes=dtypes,
            types={v.name: v.type.tensor_type.elem_type for v in (*model.input, *model.output)},
            outputs=graph.outputs,
            output_names=[each.name for each in model.output],
            device=device,
            is_static=is_static,
            rewritten=region.rewritten if is_static else {},
            read=tuple(sorted(tensors - held)),
        )

    def fed(self, session: Any) -> tuple[int, ...]:
        """Positions of the arguments that a session takes as inputs.

        The session holds the other arguments already, or does not read them.
        """
        inputs = {each.name for each in session.get_inputs()}
        return tuple(i for i, name in enumerate(self.names) if name in inputs)

    def reused(self, args: tuple[Any, ...]) -> dict[int, torch.Tensor]:
        """Maps each result that this call writes in place to the argument whose memory it gets.

        An argument that shares memory with another one is not used: the other could be read after
        its memory is overwritten.
        """
        shared = sharing.overlapping({i: args[i] for i in self.read})
        return {
            result: args[at]
            for result, at in self.rewritten.items()
            if at not in shared and args[at].is_contiguous()
        }


def allocator(output: Output, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that allocates a result of fixed shape, as the model returns it."""
    assert output.shape is not None
    assert output.dtype is not None
    return _torch.tensors.empty(output.shape, output.dtype, device)
