"""The captured graph as it runs without an engine, with checkpoints as eager has them.

``tag_activation_checkpoint`` is written for AOTAutograd, which sees to it that random numbers are
drawn once. Run by itself (torch 2.13, ``backend="eager"`` too) it draws new ones when the backward
computes the forward again: the gradients of a dropout are those of another mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.utils.checkpoint import checkpoint

from composer import _torch
from composer.graphs.clones import clone_graph


def eager_forward(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """The graph's own forward; of a copy that differs in its checkpoints, if it has any."""
    if any(map(_checkpoints, _graphs(gm))):
        gm = clone_graph(gm)
        for each in _graphs(gm):
            for node in _checkpoints(each):
                node.target = _checkpoint
            each.recompile()
    return _torch.settled_forward(gm)


def _graphs(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    return [each for each in gm.modules() if isinstance(each, torch.fx.GraphModule)]


def _checkpoints(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    target = torch.ops.higher_order.tag_activation_checkpoint
    return list(gm.graph.find_nodes(op="call_function", target=target))


def _checkpoint(body: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Run the body as the program asked for; Dynamo keeps a ``context_fn`` with the body."""
    if "_checkpoint_context_fn" in body.meta:
        kwargs["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **{**kwargs, "use_reentrant": False})
