"""Modes that nodes of a captured graph set: grad mode, autocast, and those of ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from composer import _torch
from composer.graphs.nodes import nodes_within


def leaving_modes(run: Callable[..., Any], gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """A function that runs the graph, and restores the modes that the graph sets if it raises."""
    if not any(_torch.modes.sets_modes(node.target) for node in nodes_within(gm)):
        return run

    def run_and_leave(*args: Any) -> Any:
        with _torch.modes.restored_modes():
            return run(*args)

    return run_and_leave
