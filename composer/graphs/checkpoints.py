"""The captured graph as it runs without an engine, with checkpoints and regions as eager has them.

``tag_activation_checkpoint`` is written for AOTAutograd, which sees to it that random numbers are
drawn once. Run by itself (torch 2.13, ``backend="eager"`` too) it draws new ones when the backward
computes the forward again: the gradients of a dropout are those of another mask.

``invoke_subgraph``, a call of a region that the program marked to be compiled once
(``torch.compiler.nested_compile_region``), has no backward outside of AOTAutograd: it raises
(torch 2.13, ``backend="eager"`` too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch.utils.checkpoint import checkpoint

from composer import _torch
from composer.graphs.clones import clone_graph
from composer.graphs.modes import leaving_modes
from composer.graphs.nodes import attribute_at


def eager_forward(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """The graph's own forward; of a copy that differs in these calls, if it has any.

    Where it raises, it leaves the modes that it has set, as eager does.
    """
    forward = _torch.sources.settled_forward(_with(gm, {_CHECKPOINT: _checkpoint, _REGION: _call}))
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
    if _CHECKPOINT in instead:
        _mark_held(twin)
    for each in _graphs(twin):
        for node in _calls(each, instead):
            node.target = instead[node.target]
        each.recompile()
    return twin


def _mark_held(gm: torch.fx.GraphModule) -> None:
    """Say of each checkpoint which of its arguments are parameters and buffers.

    Dynamo makes arguments of them. In eager the module itself holds them: it may write to its
    buffers, where an argument that is written to cannot be computed from again.
    """
    held = set(filter(_torch.dynamo.is_static_input, gm.graph.find_nodes(op="placeholder")))
    for graph in _graphs(gm):
        for node in _calls(graph, [_CHECKPOINT]):
            body, *given = cast("tuple[torch.fx.Node, ...]", node.args)
            own = tuple(i for i, each in enumerate(given) if each in held)
            node.kwargs = {**node.kwargs, "held": own}
            within = cast("torch.fx.GraphModule", attribute_at(graph, str(body.target)))
            inputs = within.graph.find_nodes(op="placeholder")
            held.update(inputs[i] for i in own)


def _graphs(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    return [each for each in gm.modules() if isinstance(each, torch.fx.GraphModule)]


def _calls(gm: torch.fx.GraphModule, targets: Iterable[Any]) -> list[torch.fx.Node]:
    found = (gm.graph.find_nodes(op="call_function", target=target) for target in targets)
    return [node for nodes in found for node in nodes]


def _call(body: torch.fx.GraphModule, _: str, *args: Any) -> Any:
    """Run a region; its name is what its compiled code is found by."""
    return body(*args)


def _checkpoint(
    body: torch.fx.GraphModule, *args: Any, held: Sequence[int] = (), **kwargs: Any
) -> Any:
    """Run the body as the program asked for; Dynamo keeps a ``context_fn`` with the body.

    Args:
        body: What is computed again.
        args: What it reads.
        held: The places of those that its modules hold.
        kwargs: The checkpoint's own.
    """
    if "_checkpoint_context_fn" in body.meta:
        kwargs["context_fn"] = body.meta["_checkpoint_context_fn"]
    own = {place: args[place] for place in held}

    def run(*given: Any) -> Any:
        rest = iter(given)
        return body(*(own[i] if i in own else next(rest) for i in range(len(args))))

    passed = [each for i, each in enumerate(args) if i not in own]
    return checkpoint(run, *passed, **{**kwargs, "use_reentrant": False})
