"""Runs AOTAutograd and the shared passes within it, for a backend that does not run them itself.

The backend compiles each of AOTAutograd's functional graphs as if Dynamo had captured it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.lowering.aot import GraphKind, through_aot
from composer.lowering.trial import placeholder_values
from composer.passes.within_aotautograd import LatePasses

Compile = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def compile_each(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    passes: LatePasses,
    build: Compile,
) -> Callable[..., Any]:
    """Run AOTAutograd with the shared passes, and let ``build`` compile each graph that it makes.

    Args:
        gm: The captured graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        passes: The shared passes to run.
        build: Compiles a functional graph. Its example inputs have the right shapes, dtypes and
            symbols, but arbitrary values.
    """

    def compiler(
        kind: GraphKind, functional: torch.fx.GraphModule, fakes: Sequence[Any]
    ) -> Callable[..., Any]:
        if kind is GraphKind.BACKWARD:
            _torch.aot.donate_nothing()  # the backend may keep its inputs
        with _torch.fakes.unset_fake_temporarily(), torch.no_grad():
            inputs = [
                made if isinstance(made, torch.Tensor) else fake
                for made, fake in zip(placeholder_values(functional), fakes, strict=True)
            ]
            with _torch.compiles.captured_with(fakes, inputs):
                return _torch.aot.boxed(build(functional, inputs))

    return through_aot(gm, example_inputs, compiler, {}, passes)
