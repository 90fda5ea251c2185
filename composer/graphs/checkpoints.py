"""Running a captured graph without an engine, with checkpoints and regions as in eager.

``tag_activation_checkpoint`` is written for AOTAutograd, which makes sure that random numbers are
drawn once. Without AOTAutograd, also with ``backend="eager"``, torch 2.11 ignores the checkpoint
(https://github.com/pytorch/pytorch/issues/160773). Torch 2.13 to 2.15 draw new numbers when the
backward recomputes the forward, and the gradients of a dropout then belong to another mask.

``invoke_subgraph`` calls a region that the program marked to be compiled once
(``torch.compiler.nested_compile_region``). In torch 2.11 to 2.13 without AOTAutograd, also with
``backend="eager"``, its backward raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch.utils.checkpoint import checkpoint

from composer import _torch
from composer.graphs.clones import clone_graph
from composer.graphs.nodes import attribute_at, graph_modules, nodes_within


def eager_forward(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """A function that runs the graph without an engine, with the results of eager.

    Checkpoints and regions, if any, are replaced in a copy of the graph. If the function raises,
    the modes that the graph has set are restored, as in eager.
    """
    whole = _with_targets(gm, {_CHECKPOINT: _checkpoint, _REGION: _call})
    return leaving_modes(_torch.sources.settled_forward(whole), gm)


def leaving_modes(run: Callable[..., Any], gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """A function that runs the graph, and restores the modes that the graph sets if it raises."""
    if not any(_torch.modes.sets_modes(node.target) for node in nodes_within(gm)):
        return run

    def run_and_leave(*args: Any) -> Any:
        with _torch.modes.restored_modes():
            return run(*args)

    return run_and_leave


def without_regions(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with regions called directly, so that tracing inlines them."""
    return _with_targets(gm, {_REGION: _call})


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_REGION = torch.ops.higher_order.invoke_subgraph


def _with_targets(
    gm: torch.fx.GraphModule, replacements: Mapping[Any, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """A copy of the graph, nested graphs included, in which calls have their new targets.

    The graph itself if it calls none of the targets to replace.
    """
    if not _calls(gm, replacements):
        return gm
    twin = clone_graph(gm)
    if _CHECKPOINT in replacements:
        _mark_held(twin)
    for node in _calls(twin, replacements):
        node.target = replacements[node.target]
    for each in graph_modules(twin):
        each.recompile()
    return twin


def _mark_held(gm: torch.fx.GraphModule) -> None:
    """Note at each checkpoint which of its arguments are parameters and buffers, as ``held``.

    Dynamo passes them as arguments; in eager the module itself holds them. The difference matters
    if the body writes to a buffer: the backward cannot recompute from an argument that was written
    to.
    """
    held = set(filter(_torch.dynamo.is_static_input, gm.graph.find_nodes(op="placeholder")))
    for node in _calls(gm, (_CHECKPOINT,)):
        body, *arguments = cast("tuple[torch.fx.Node, ...]", node.args)
        places = tuple(i for i, argument in enumerate(arguments) if argument in held)
        node.kwargs = {**node.kwargs, "held": places}
        owner = node.graph.owning_module
        within = cast("torch.fx.GraphModule", attribute_at(owner, str(body.target)))
        inputs = within.graph.find_nodes(op="placeholder")
        held.update(inputs[i] for i in places)


def _calls(gm: torch.fx.GraphModule, targets: Collection[Any]) -> list[torch.fx.Node]:
    """The calls of ``targets`` in a graph and in the graphs nested in it, the outer ones first."""
    return [node for node in nodes_within(gm) if node.target in targets]


def _call(body: torch.fx.GraphModule, _: str, *args: Any) -> Any:
    """Run a region; the second argument, the name of its compiled code, is not needed."""
    return body(*args)


def _checkpoint(
    body: torch.fx.GraphModule, *args: Any, held: Sequence[int] = (), **kwargs: Any
) -> Any:
    """Run the body under torch's checkpoint, with the options that the program gave.

    ``held`` are the positions of the parameters and buffers among the arguments. Dynamo stores a
    ``context_fn`` in the metadata of the body.
    """
    if "_checkpoint_context_fn" in body.meta:
        kwargs["context_fn"] = body.meta["_checkpoint_context_fn"]
    kwargs["use_reentrant"] = False
    passed = {i: argument for i, argument in enumerate(args) if i not in held}

    def run(*recomputed: Any) -> Any:
        arguments = dict(enumerate(args)) | dict(zip(passed, recomputed, strict=True))
        return body(*arguments.values())

    return checkpoint(run, *passed.values(), **kwargs)
