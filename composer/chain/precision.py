"""The policy's ``precision``: the graph with its products in bfloat16 or in eight bits.

A copy of the graph is rewritten (:class:`~composer.passes.lower_precision.LowerPrecision`,
:class:`~composer.passes.quantize_products.QuantizeProducts`), for the candidates that compute all
or a part of it (:mod:`composer.chain.mixed_precision`) in low precision. All other candidates and
the eager fallback keep the graph as it was captured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch, session
from composer.build import Precision
from composer.graphs import clones, collectives, low_precision, writes
from composer.lowering.partition.regions import Region
from composer.lowering.weights.narrow import Copy, Key, NarrowWeights
from composer.lowering.weights.watchable import watchable
from composer.passes import before_autograd
from composer.passes.ahead import computed_ahead
from composer.passes.canonical import to_aten
from composer.passes.lower_precision import LowerPrecision, products_of
from composer.passes.quantize_products import QuantizeProducts
from composer.passes.resolve import SharedPasses
from composer.records import GraphRequest, Int8, LowPrecision


class Stays(Exception):
    """Raised if the graph is not rewritten; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """A graph whose products are in low precision.

    Attributes:
        request: The graph, with copies of weights among its inputs.
        products: How many operations the graph computes in low precision.
        around: Wraps what was compiled for this graph so that it takes the captured graph's inputs.
        copies: The copies of weights, kept alive until an engine holds them.
        told: The precision that the engine is asked for.
    """

    request: GraphRequest
    products: int
    around: Callable[[Callable[..., Any]], Callable[..., Any]]
    copies: tuple[Copy, ...] = ()
    told: Precision = "fp32"


def narrow(
    request: GraphRequest,
    precision: LowPrecision,
    *,
    tentative: bool,
    marks: bool = False,
    wide: tuple[int, ...] = (),
    int8: Int8 = "products",
) -> Narrow:
    """Return the graph with its products in low precision; copies of weights are made ahead.

    Args:
        request: The graph that every candidate is given, and the inputs of a call.
        precision: The precision.
        tentative: Rewrite only if the precision may be faster and the numbers can be compared: not
            in training, and in bf16 on a processor with bf16 arithmetic.
        marks: For an engine that chooses the precision itself. The graph is not rewritten. If
            products stay wide, the nodes from the first product behind all of them on are marked.
        wide: The products that stay in float32, by their places among all products.
        int8: What the engine computes faster in eight bits.

    Raises:
        Stays: there is nothing to gain, or nothing to rewrite.
    """
    if why := _why_not(request, precision, tentative=tentative):
        raise Stays(why)
    gm, products = _rewritten(request, precision, wide, int8)
    if not marks:
        made = _with_copies(request, clones.clone_graph(gm), products)
        return dataclasses.replace(made, told=precision if precision == "int8" else "fp32")
    marked = _marked(request, max(wide) + 1) if wide else request
    return Narrow(marked, products, lambda compiled: compiled, told=precision)


def _why_not(request: GraphRequest, precision: LowPrecision, *, tentative: bool) -> str:
    """Return why the graph is not rewritten; empty if it can be."""
    if request.device != "cpu":
        return (
            f"the graph is on {request.device}; only graphs on the CPU are computed in {precision}"
        )
    if torch.is_autocast_enabled("cpu"):
        return "it runs under torch.autocast, which decides the precision"
    if request.training and (tentative or precision == "int8"):
        return "the graph trains"
    return _why_not_tried(request, precision) if tentative else ""


def _why_not_tried(request: GraphRequest, precision: LowPrecision) -> str:
    """Return why it cannot be faster or cannot be compared here; empty if it can be tried."""
    if precision == "bf16" and not _torch.processor.multiplies_bf16():
        return "this processor has no bf16 arithmetic"
    if any(isinstance(value, _torch.fakes.FakeTensor) for value in request.example_inputs):
        return "the graph was compiled without real inputs to compare numbers on"
    if collectives.meets_other_ranks(request.gm):
        return "other ranks would have to run the graph's collectives to compare numbers"
    return ""


Rewritten = tuple[torch.fx.GraphModule, int]
"""A graph, and how many of its products are in low precision."""


def _rewritten(
    request: GraphRequest, precision: LowPrecision, wide: tuple[int, ...], int8: Int8
) -> Rewritten:
    """Return the graph with all products except the ``wide`` ones in low precision.

    Raises:
        Stays: the graph cannot be rewritten.
    """
    known: dict[Any, Rewritten | str] = request.made_of_graph().setdefault("rewritten", {})
    key = precision, wide, int8
    if key not in known:
        for part in [each for each in known if each[1]]:  # parts are tried in turn; keep the last
            del known[part]
        known[key] = _rewrite(request, precision, wide, int8)
    found = known[key]
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


def _rewrite(
    request: GraphRequest, precision: LowPrecision, wide: tuple[int, ...], int8: Int8
) -> Rewritten | str:
    lowering = LowerPrecision(wide) if precision == "bf16" else QuantizeProducts(wide, int8)
    passes = SharedPasses((lowering,))
    rewritten, (record,) = before_autograd.rewrite(request, passes, copy_at_aten)
    if record.error:
        return record.error
    if not record.matches:
        nested = any(isinstance(each, torch.fx.GraphModule) for each in request.gm.children())
        outside = " outside of nested graphs, such as the branches of torch.cond," if nested else ""
        meant = _MEANT["bf16" if precision == "bf16" else int8]
        return f"it has no {meant} of float32{outside} to compute in {precision}"
    return rewritten.gm, record.matches


_MEANT = {
    "bf16": "product or convolution",
    "products": "product with a weight",
    "weights": "product of few rows with a weight",
}


def _with_copies(request: GraphRequest, gm: torch.fx.GraphModule, products: int) -> Narrow:
    """Replace what the graph would compute from weights at every call by copies.

    This is not done in training, where weights change and gradients flow through the rounding.
    """
    twin = dataclasses.replace(request, gm=gm, torch_gm=None)
    placeholders = gm.graph.find_nodes(op="placeholder")
    ahead = computed_ahead(gm.graph)
    candidates = request.weights - writes.assigned_inputs(request.gm)
    read = [i for i in candidates if placeholders[i].name in ahead and _is_fixed(placeholders[i])]
    values = watchable({i: request.example_inputs[i] for i in read})
    if request.training or not values:
        return Narrow(twin, products, lambda compiled: compiled)
    shared = session.current().copies
    inputs = list(request.example_inputs)
    takes: dict[int, Key] = {}
    copies: list[Copy] = []
    for i, weight in sorted(values.items()):
        for how, nodes in ahead[placeholders[i].name].items():
            copy = shared.of(weight, how)
            added = _added(gm.graph, placeholders[i], copy.values, nodes[0])
            for node in nodes:
                node.replace_all_uses_with(added)
            _erase_unread(nodes)
            if placeholders[i].users:
                takes[len(inputs)] = i, how
                inputs.append(copy.values)
            else:  # nothing else reads the weight, so the copy takes its place
                takes[i] = i, how
                inputs[i] = copy.values
                placeholders[i].meta = added.meta
                added.replace_all_uses_with(placeholders[i])
                gm.graph.erase_node(added)
            copies.append(copy)
    gm.recompile()
    weights = request.weights | set(range(len(request.example_inputs), len(inputs)))
    twin = dataclasses.replace(twin, example_inputs=tuple(inputs), weights=frozenset(weights))
    region = Region(gm, values, {}, {})
    around = functools.partial(NarrowWeights, region=region, takes=takes, copies=shared)
    return Narrow(twin, products, around, tuple(copies))


def _is_fixed(placeholder: torch.fx.Node) -> bool:
    """Return True if a weight has no dynamic size; others are rounded by the graph."""
    return all(isinstance(size, int) for size in placeholder.meta["val"].shape)


def _added(
    graph: torch.fx.Graph, weight: torch.fx.Node, copy: torch.Tensor, computed: torch.fx.Node
) -> torch.fx.Node:
    """Add a last placeholder, for a copy of a weight in the place of a node that computes it."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        added = graph.placeholder(f"{weight.target}_ahead")
    added.target = added.name  # a weight may have several copies, and only names are unique
    added.meta.update(weight.meta)
    added.meta["val"] = added.meta["example_value"] = computed.meta["val"]
    fake = _torch.fakes.fake_of_fixed_size(copy)
    if fake is not None:
        added.meta["example_value"] = fake
    _torch.sources.carry_no_source(weight, added)
    return added


def _erase_unread(nodes: Iterable[torch.fx.Node]) -> None:
    """Erase these nodes, and those that only they read."""
    for node in nodes:
        if node.op == "call_function" and not node.users:
            given = node.all_input_nodes
            node.graph.erase_node(node)
            _erase_unread(given)
