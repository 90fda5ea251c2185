"""An engine for each fault, which has it only on graphs where a sum reads what gelu returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from composer.testing import FakeBackend, Fault

Engine = Callable[[torch.fx.GraphModule, list[Any]], Any]


def has_gelu_and_sum(gm: torch.fx.GraphModule) -> bool:
    """Whether a sum of the graph reads what gelu returns."""
    sums = [node for node in gm.graph.nodes if "sum" in str(node.target)]
    return any("gelu" in str(read.target) for node in sums for read in node.all_input_nodes)


def engine_with(fault: Fault) -> Engine:
    """Return an engine that has a fault on such graphs, and is honest on others."""

    def engine(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return FakeBackend(fault if has_gelu_and_sum(gm) else None)(gm, inputs)

    return engine


globals().update({str(fault): engine_with(fault) for fault in Fault})
