"""Makes the graph of the ``aten`` stage from the captured graph: canonical ATen before autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import attribute_at
from composer.passes import metadata


class NotCanonical(Exception):
    """A captured graph cannot be expressed in ATen before autograd."""


def to_aten(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Trace a captured graph to ATen: the same function with the same inputs.

    Each call in the result is one operator overload. The result also trains like ``gm``: it keeps
    operations in place, views, random numbers, updates of batch norm's statistics, and regions
    without grad or with autocast. Parameters of ``gm`` stay attributes with the same names.

    Args:
        gm: The captured graph; it is not changed.
        example_inputs: Tensors and symbols, in the order of the placeholders.

    Raises:
        NotCanonical: The graph has an operation that ATen before autograd cannot express.
    """
    _check(gm)
    state = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    interpreted = _Interpreted(gm)

    def run(*args: Any) -> Any:
        held = {f"gm.{name}": value for name, value in zip(state, args, strict=False)}
        return torch.func.functional_call(interpreted, held, args[len(state) :])

    given = [*state.values(), *example_inputs]
    traced = _torch.canonical.capture_aten(run, given)
    placeholders = traced.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, given, strict=True):
        if isinstance(value, torch.Tensor):  # tracing does not keep requires_grad
            node.meta["val"].requires_grad_(value.requires_grad)
    for node, name in zip(placeholders, state, strict=False):
        _make_attribute(node, name)
    captured = gm.graph.find_nodes(op="placeholder")
    for node, original in zip(placeholders[len(state) :], captured, strict=True):
        _make_like(node, original)
    return _assembled(traced, gm)


def _check(gm: torch.fx.GraphModule) -> None:
    """Raise ``NotCanonical`` for operations that tracing cannot keep (torch 2.13).

    Tracing silently loses some things, such as the gradient of a custom autograd function.
    Transforms of ``torch.func`` leave functorch calls in the graph, which fail at run time. Of the
    operators that take graphs as arguments, only ``torch.cond`` is known to work.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and not _torch.canonical.is_canonical(node.target):
            name = getattr(node.target, "__name__", str(node.target))
            raise NotCanonical(f"the graph calls {name}, which ATen before autograd cannot say")


class _Interpreted(torch.nn.Module):
    """Runs a graph node by node, so that the metadata of each node reaches the traced graph."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *args: Any) -> Any:
        with metadata.autocast_regions() as regions:
            return _InRegions(self.gm, regions).run(*args)


class _InRegions(torch.fx.Interpreter):
    """Runs a graph, and enters and leaves its autocast regions, which the trace records as well.

    If it called the functions that Dynamo wrote for them instead, tracing would only record the
    calls (torch 2.13). All results in these regions would then have the wrong dtype.
    """

    def __init__(self, gm: torch.fx.GraphModule, regions: metadata.AutocastRegions) -> None:
        super().__init__(gm)
        self._regions = regions

    def run_node(self, n: torch.fx.Node) -> Any:
        if not _torch.modes.changes_autocast(n.target):
            return super().run_node(n)
        metadata.follow(n, self._regions)
        torch.set_autocast_cache_enabled(False)  # a cast from the cache would not be recorded
        return None


def _make_attribute(node: torch.fx.Node, name: str) -> None:
    with node.graph.inserting_before(node):
        held = node.graph.create_node("get_attr", name)  # Graph.get_attr warns: not yet there
    held.meta = dict(node.meta)
    node.replace_all_uses_with(held)
    node.graph.erase_node(node)


def _make_like(node: torch.fx.Node, original: torch.fx.Node) -> None:
    """Give a placeholder the name and the metadata that Dynamo gave to the original."""
    node.target = original.target
    node.name = original.name
    node.meta = {**original.meta, **node.meta}
    _torch.sources.carry_node_source(original, node)


def _assembled(traced: torch.fx.GraphModule, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return the traced graph with the attributes of ``gm`` and those that tracing added."""
    root: dict[str, Any] = {}
    for node in traced.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        own = attribute_at(gm, name)
        root[name] = attribute_at(traced, name) if own is None else own
    made = _torch.sources.lazy_graph_module(root, traced.graph, type(gm).__name__)
    made.meta.update(gm.meta)
    made.training = gm.training  # not train(): leaf modules belong to the user's program
    _torch.sources.carry_attributes(gm, made)
    _torch.sources.let_go_of_examples(made)
    return made
