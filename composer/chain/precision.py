"""The policy's ``precision``: the graph with its matrix products and convolutions in bfloat16.

A copy of the graph is rewritten (:class:`~composer.passes.lower_precision.LowerPrecision`), for the
candidates that compute all or a part of it (:mod:`composer.chain.mixed_precision`) in bf16. All
other candidates and the eager fallback keep the graph as it was captured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch, session
from composer.graphs import clones, collectives, low_precision, writes
from composer.lowering.partition.regions import Region
from composer.lowering.weights.narrow import Copy, NarrowWeights
from composer.lowering.weights.watchable import watchable
from composer.passes import before_autograd
from composer.passes.canonical import to_aten
from composer.passes.lower_precision import LowerPrecision, casts_in, products_of
from composer.passes.resolve import SharedPasses
from composer.records import GraphRequest


class Stays(Exception):
    """Raised if the graph is not rewritten; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """A graph whose products and convolutions are in bfloat16.

    Attributes:
        request: The graph, with rounded weights among its inputs. If a weight is read in both
            precisions, it stays an input and its rounded copy is an additional last input.
        products: How many operations the graph computes in bfloat16.
        around: Wraps what was compiled for this graph so that it takes the captured graph's inputs.
        copies: The rounded weights, kept alive until an engine holds them.
    """

    request: GraphRequest
    products: int
    around: Callable[[Callable[..., Any]], Callable[..., Any]]
    copies: tuple[Copy, ...] = ()


def narrow(
    request: GraphRequest, *, tentative: bool, marks: bool = False, in_fp32: int = 0
) -> Narrow:
    """Return the graph with its products in bfloat16; their weights are rounded once, ahead.

    Args:
        request: The graph that every candidate is given, and the inputs of a call.
        tentative: Rewrite only if bf16 may be faster and the numbers can be compared: on a
            processor with bf16 arithmetic, and not in training.
        marks: For an engine that chooses the precision itself. The graph is not rewritten. If
            ``in_fp32`` is not 0, the nodes that may be in bfloat16 are marked.
        in_fp32: How many products, from the first on, stay in float32.

    Raises:
        Stays: there is nothing to gain, or nothing to rewrite.
    """
    if why := _why_not(request, tentative=tentative):
        raise Stays(why)
    gm, products = _rewritten(request, in_fp32)
    if not marks:
        return _with_copies(request, clones.clone_graph(gm), products)
    marked = _marked(request, in_fp32) if in_fp32 else request
    return Narrow(marked, products, lambda compiled: compiled)


def _why_not(request: GraphRequest, *, tentative: bool) -> str:
    """Return why the graph is not rewritten; empty if it can be."""
    if request.device != "cpu":
        return f"the graph is on {request.device}; only graphs on the CPU are computed in bf16"
    if torch.is_autocast_enabled("cpu"):
        return "it runs under torch.autocast, which decides the precision"
    return _why_not_tried(request) if tentative else ""


def _why_not_tried(request: GraphRequest) -> str:
    """Return why bf16 cannot be faster or cannot be compared here; empty if it can be tried."""
    if request.training:
        return "the graph trains"
    if not _torch.processor.multiplies_bf16():
        return "this processor has no bf16 arithmetic"
    if any(isinstance(value, _torch.fakes.FakeTensor) for value in request.example_inputs):
        return "the graph was compiled without real inputs to compare numbers on"
    if collectives.meets_other_ranks(request.gm):
        return "other ranks would have to run the graph's collectives to compare numbers"
    return ""


Rewritten = tuple[torch.fx.GraphModule, int]
"""A graph, and how many of its products are in bfloat16."""


def _rewritten(request: GraphRequest, in_fp32: int) -> Rewritten:
    """Return the graph with all products except the first ``in_fp32`` in bfloat16.

    Raises:
        Stays: the graph cannot be rewritten.
    """
    known: dict[int, Rewritten | str] = request.made_of_graph().setdefault("rewritten", {})
    if in_fp32 not in known:
        for part in known.keys() - {0}:  # parts are tried one after the other; keep only the last
            del known[part]
        known[in_fp32] = _rewrite(request, in_fp32)
    found = known[in_fp32]
    if isinstance(found, str):
        raise Stays(found)
    return found


def _marked(request: GraphRequest, in_fp32: int) -> GraphRequest:
    """Return the graph with every node marked from the first product in bfloat16 on."""
    gm = copy_at_aten(request)
    nodes = list(gm.graph.nodes)
    for node in nodes[nodes.index(products_of(gm)[in_fp32]) :]:
        low_precision.mark(node)
    _torch.sources.name_sources(gm)
    return dataclasses.replace(request, gm=gm, torch_gm=None)


def copy_at_aten(request: GraphRequest) -> torch.fx.GraphModule:
    """Return a copy of the graph in ATen operators.

    The ATen graph is kept, because the symbols cannot be captured again at run time.
    """
    made = request.made_of_graph()
    if "aten" not in made:
        with _torch.modes.restored_modes():
            made["aten"] = to_aten(request.gm, request.example_inputs)
    return clones.clone_graph(made["aten"], _torch.sources.lazy_graph_module)


def _rewrite(request: GraphRequest, in_fp32: int) -> Rewritten | str:
    passes = SharedPasses((LowerPrecision(in_fp32),))
    rewritten, (record,) = before_autograd.rewrite(request, passes, copy_at_aten)
    if record.error:
        return record.error
    if not record.matches:
        nested = any(isinstance(each, torch.fx.GraphModule) for each in request.gm.children())
        outside = " outside of nested graphs, such as the branches of torch.cond," if nested else ""
        return f"it has no product or convolution of float32{outside} to compute in bf16"
    return rewritten.gm, record.matches


def _with_copies(request: GraphRequest, gm: torch.fx.GraphModule, products: int) -> Narrow:
    """Replace weights that the graph would round at every call by copies that are rounded once.

    This is not done in training, where weights change and gradients flow through the rounding.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    written = writes.assigned_inputs(request.gm)
    cast = [i for i in request.weights - written if casts_in(placeholders[i])]
    fixed = {i: request.example_inputs[i] for i in cast if _is_fixed(placeholders[i])}
    rounded = sorted(watchable(fixed))
    if request.training or not rounded:
        twin = dataclasses.replace(request, gm=gm, torch_gm=None)
        return Narrow(twin, products, lambda compiled: compiled)
    shared = session.current().copies
    copies = {i: shared.of(request.example_inputs[i]) for i in rounded}
    inputs = list(request.example_inputs)
    places: list[int] = []
    more: list[int] = []
    for i, copy in copies.items():
        if len(casts_in(placeholders[i])) == len(placeholders[i].users):
            places.append(i)
            inputs[i] = copy.values
            _retype(placeholders[i], placeholders[i], copy.values)
        else:
            more.append(i)
            inputs.append(copy.values)
            _retype(placeholders[i], _added(gm.graph, placeholders[i]), copy.values)
    gm.recompile()
    weights = request.weights | set(range(len(request.example_inputs), len(inputs)))
    twin = dataclasses.replace(
        request,
        gm=gm,
        torch_gm=None,
        example_inputs=tuple(inputs),
        weights=frozenset(weights),
    )
    values = {i: request.example_inputs[i] for i in rounded}
    region = Region(gm, values, {}, {})
    around = functools.partial(
        NarrowWeights, region=region, places=places, more=more, copies=shared
    )
    return Narrow(twin, products, around, tuple(copies.values()))


def _is_fixed(placeholder: torch.fx.Node) -> bool:
    """Return True if a weight has no dynamic size; others are rounded by the graph."""
    return all(isinstance(size, int) for size in placeholder.meta["val"].shape)


def _added(graph: torch.fx.Graph, weight: torch.fx.Node) -> torch.fx.Node:
    """Add a last placeholder, for the copy of a weight that also stays an input itself."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        added = graph.placeholder(f"{weight.target}_in_bf16")
    added.meta.update(weight.meta)
    _torch.sources.carry_no_source(weight, added)
    return added


def _retype(weight: torch.fx.Node, placeholder: torch.fx.Node, copy: torch.Tensor) -> None:
    """Make all users of the rounded ``weight`` read ``placeholder``, the input of ``copy``."""
    casts = casts_in(weight)
    placeholder.meta["val"] = placeholder.meta["example_value"] = casts[0].meta["val"]
    fake = _torch.fakes.fake_of_fixed_size(copy)
    if fake is not None:
        placeholder.meta["example_value"] = fake
    for cast in casts:
        cast.replace_all_uses_with(placeholder)
        cast.graph.erase_node(cast)
