"""An honest engine that remembers the dtypes it was given, and models to give it."""

from __future__ import annotations

from typing import Any

import torch
from common import last
from torch import Tensor, nn

from composer import _torch

PRODUCTS = ("linear", "matmul", "conv2d", "scaled_dot_product_attention")


class Spy:
    """An honest engine that remembers what it was given.

    ``products`` are the dtypes of the operands of each product, ``given`` those of the inputs.
    """

    def __init__(self, name: str = "spy") -> None:
        self.__name__ = name
        self.products: list[set[torch.dtype]] = []
        self.given: list[torch.dtype] = []
        self.gm: torch.fx.GraphModule | None = None

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.gm = gm
        self.given = [each.dtype for each in example_inputs if isinstance(each, Tensor)]
        self.products = [
            {each.meta["val"].dtype for each in node.all_input_nodes}
            for node in gm.graph.nodes
            if any(
                f"aten::{name}" == _torch.operators.operator_name(node.target) for name in PRODUCTS
            )
        ]
        return _torch.dynamo.lookup_backend("aot_eager")(gm, example_inputs)


def layers(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)).eval()


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def told() -> list[Any]:
    return [
        (a.backend, a.engine.get("precision"), a.status, a.reason and str(a.reason))
        for a in last().attempts
    ]


def cancels(x: Tensor) -> Tensor:
    """All that is left of large numbers is what bfloat16 rounds off."""
    ones = torch.ones(x.shape[-1], 4)
    return (x + 1000) @ ones - 1000 * x.shape[-1]
