"""Copies of a graph, and what Dynamo says of its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.fx
from torch._dynamo.source import ConstantSource

from composer._torch.names import optional


def example_values(gm: torch.fx.GraphModule) -> list[Any]:
    """The fake tensor or symbol that Dynamo captured for each input; ``None`` without Dynamo."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [node.meta.get("example_value") for node in placeholders]


def carry_source_metadata(source: torch.fx.GraphModule, copy: torch.fx.GraphModule) -> None:
    """Copy to a graph's copy what copying dropped, so that AOTAutograd still sees static inputs.

    Dynamo keeps it in attributes because ``meta`` is pickled (pytorch/pytorch#141640). When Dynamo
    moves it into ``meta``, this function can go.
    """
    carry_attributes(source, copy)
    for node, twin in zip(source.graph.nodes, copy.graph.nodes, strict=True):
        carry_node_source(node, twin)


def carry_attributes(source: torch.fx.GraphModule, copy: torch.fx.GraphModule) -> None:
    """Copy the attributes that Dynamo set on the graph module itself."""
    for name, value in vars(source).items():
        if name not in vars(copy):
            object.__setattr__(copy, name, value)


def carry_node_source(node: torch.fx.Node, twin: torch.fx.Node) -> None:
    """Copy the source of a placeholder, that is, where Dynamo says that it comes from."""
    if hasattr(node, "_dynamo_source"):
        twin._dynamo_source = node._dynamo_source


def carry_no_source(node: torch.fx.Node, added: torch.fx.Node) -> None:
    """Mark a placeholder as added to ``node``'s graph, so that it has no source of Dynamo's.

    AOTAutograd refuses a graph of Dynamo's in which a placeholder lacks the attribute. It accepts
    the value ``None``, which is meant for placeholders that are added when a graph is split.
    """
    if hasattr(node, "_dynamo_source"):
        cast(Any, added)._dynamo_source = None


def let_go_of_examples(copy: torch.fx.GraphModule) -> None:
    """Remove the real inputs from the placeholders of a copy.

    Dynamo removes them from its own graph after a compile. Some are weak references to tensors, and
    ``torch.utils.swap_tensors`` refuses to swap such tensors. Others are not weak.
    """
    for node in copy.graph.find_nodes(op="placeholder"):
        node.meta.pop("grapharg", None)


def name_sources(gm: torch.fx.GraphModule) -> None:
    """Give buffers and parameters that Dynamo has not seen a source, the graph itself.

    AOTAutograd refuses a graph of Dynamo's if a buffer or a parameter has no source. Tracing adds
    such buffers (for ``torch.tensor([1.0])``), and passes may add some, too.
    """
    known = getattr(gm, "_param_name_to_source", None)
    if known is None:
        return
    held = (*dict(gm.named_parameters()), *dict(gm.named_buffers()))
    added = {name: ConstantSource(name) for name in held}
    object.__setattr__(gm, "_param_name_to_source", {**added, **known})


_LAZY = "generating the code of a graph only when it is called"


@optional(
    _LAZY,
    "torch.fx._lazy_graph_module:_use_lazy_graph_module",
    without=contextlib.nullcontext,
)
def lazily() -> contextlib.AbstractContextManager[None]:
    """Make graph modules within that generate their code when they are first called."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return cast(contextlib.AbstractContextManager[None], _use_lazy_graph_module(True))


@optional(
    _LAZY,
    "torch.fx._lazy_graph_module:_LazyGraphModule",
    without=torch.fx.GraphModule,
)
def lazy_graph_module(root: Any, graph: torch.fx.Graph, name: str) -> torch.fx.GraphModule:
    """A graph module that generates its code when it is first called, as Dynamo's do.

    ``recompile`` then costs a graph that is only edited nothing.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, name)


def settled_forward(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """``gm.forward``, generated now: a lazy graph module would look it up anew at every call."""
    if hasattr(gm, "real_recompile"):
        cast(Any, gm).real_recompile()
    return gm.forward


def lasting_metadata(node: torch.fx.Node) -> dict[str, Any]:
    """The metadata of a node that mean the same in another process: its line, and Dynamo's mark."""
    metadata: dict[str, Any] = {}
    if node.meta.get("stack_trace"):
        metadata["stack_trace"] = node.meta["stack_trace"]
    mark = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    if mark:
        metadata["tensor_dict"] = {"_dynamo_static_input_type": mark}
    return metadata
