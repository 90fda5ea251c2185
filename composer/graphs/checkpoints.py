"""The captured graph as it runs without an engine, with checkpoints and regions as eager has them.

``tag_activation_checkpoint`` is written for AOTAutograd, which sees to it that random numbers are
drawn once. Run by itself (torch 2.13, ``backend="eager"`` too) it draws new ones when the backward
computes the forward again: the gradients of a dropout are those of another mask.

``invoke_subgraph``, a call of a region that the program marked to be compiled once
(``torch.compiler.nested_compile_region``), has no backward outside of AOTAutograd: it raises
(torch 2.13, ``backend="eager"`` too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.fx
from torch.utils.checkpoint import checkpoint

from composer import _torch
from composer.graphs.clones import clone_graph
from composer.graphs.modes import leaving_modes


def eager_forward(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """The graph's own forward; of a copy that differs in these calls, if it has any.

    Where it raises, it leaves the modes that it has set, as eager does.
    """
    forward = _torch.settled_forward(_with(gm, {_CHECKPOINT: _checkpoint, _REGION: _call}))
    return leaving_modes(forward, gm)


def without_regions(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with what its regions do in place of calls of them, once it is traced."""
    return _with(gm, {_REGION: _call})


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_REGION = torch.ops.higher_order.invoke_subgraph


def _with(
    gm: torch.fx.GraphModule, instead: Mapping[Any, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """The graph, or a copy in which other functions are called; nested graphs likewise."""
    if not any(_calls(each, instead) for each in _graphs(gm)):
        return gm
    twin = clone_graph(gm)
    for each in _graphs(twin):
        for node in _calls(each, instead):
            node.target = instead[node.target]
        each.recompile()
    return twin


def _graphs(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    return [each for each in gm.modules() if isinstance(each, torch.fx.GraphModule)]


def _calls(gm: torch.fx.GraphModule, targets: Iterable[Any]) -> list[torch.fx.Node]:
    found = (gm.graph.find_nodes(op="call_function", target=target) for target in targets)
    return [node for nodes in found for node in nodes]


def _call(body: torch.fx.GraphModule, _: str, *args: Any) -> Any:
    """Run a region; its name is what its compiled code is found by."""
    return body(*args)


def _checkpoint(body: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Run the body as the program asked for; Dynamo keeps a ``context_fn`` with the body."""
    if "_checkpoint_context_fn" in body.meta:
        kwargs["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **{**kwargs, "use_reentrant": False})
