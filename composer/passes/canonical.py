"""The graph of the ``aten`` stage: canonical ATen before autograd, made from the captured graph."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.clones import attribute_at


def to_aten(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """The same function as ``gm``, one overload per call, on the same inputs.

    It trains as ``gm`` does: in-place operations, views, random numbers, batch norm's statistics
    and regions without grad or with autocast stand in it as they do there. Parameters that ``gm``
    holds itself stay attributes of the same name.

    Args:
        gm: The captured graph; it is not changed.
        example_inputs: Tensors and symbols, in the order of the placeholders.
    """
    state = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    interpreted = _Interpreted(gm)

    def run(*args: Any) -> Any:
        held = {f"gm.{name}": value for name, value in zip(state, args, strict=False)}
        return torch.func.functional_call(interpreted, held, args[len(state) :])

    traced = _torch.capture_aten(run, [*state.values(), *example_inputs])
    placeholders = traced.graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, state, strict=False):
        _make_attribute(node, name)
    captured = gm.graph.find_nodes(op="placeholder")
    for node, original in zip(placeholders[len(state) :], captured, strict=True):
        _make_like(node, original)
    return _assembled(traced, gm)


class _Interpreted(torch.nn.Module):
    """Runs a graph node by node, so that what it says of each node reaches what is traced."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *args: Any) -> Any:
        with contextlib.ExitStack() as left_open:
            return _InRegions(self.gm, left_open).run(*args)


class _InRegions(torch.fx.Interpreter):
    """Is in a region of autocast where the graph is.

    Tracing records where a region begins and ends, and stays outside; its fake values would have
    the dtypes of outside, and an operation that is given one of each fails.
    """

    def __init__(self, gm: torch.fx.GraphModule, left_open: contextlib.ExitStack) -> None:
        super().__init__(gm)
        self.left_open = left_open
        self.regions: dict[Any, contextlib.ExitStack] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        returned = super().call_function(target, args, kwargs)
        if _torch.enters_autocast(target):
            region = contextlib.ExitStack()
            region.enter_context(torch.autocast(*args, **kwargs))
            self.regions[returned] = self.left_open.enter_context(region)
        elif args and _torch.changes_state(target) and args[0] in self.regions:
            self.regions.pop(args[0]).close()
        return returned


def _make_attribute(node: torch.fx.Node, name: str) -> None:
    with node.graph.inserting_before(node):
        held = node.graph.get_attr(name)
    held.meta = dict(node.meta)
    node.replace_all_uses_with(held)
    node.graph.erase_node(node)


def _make_like(node: torch.fx.Node, original: torch.fx.Node) -> None:
    """Give a placeholder the name and the metadata that Dynamo gave to the original."""
    node.target = original.target
    node.name = original.name
    node.meta = {**original.meta, **node.meta}
    _torch.carry_node_source(original, node)


def _assembled(traced: torch.fx.GraphModule, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The traced graph with attributes of ``gm``, and those that tracing added."""
    names = {str(node.target) for node in traced.graph.find_nodes(op="get_attr")}
    found = ((name, attribute_at(gm, name)) for name in names)
    root = {name: attribute_at(traced, name) if v is None else v for name, v in found}
    made = torch.fx.GraphModule(root, traced.graph, type(gm).__name__)
    made.meta.update(gm.meta)
    made.train(gm.training)
    _torch.carry_attributes(gm, made)
    return made
