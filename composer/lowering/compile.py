"""Compiles a captured graph for an ONNX engine: everything that is the same for all engines.

AOTAutograd makes the graph functional (:mod:`composer.lowering.aot`). It is cut into regions that
the engine takes (:mod:`composer.lowering.partition.by_trial`), with the weights bound by address.
The result runs once before it is accepted (:mod:`composer.lowering.trial`). A graph that an earlier
process compiled is found on disk (:mod:`composer.lowering.export.whole`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from composer import _torch
from composer.build import BuildFacts
from composer.errors import Refusal, refuse
from composer.graphs import clones, low_precision
from composer.lowering.aot import FunctionalGraph, GraphKind, compile_functional
from composer.lowering.engine import NodesRefused, OnnxBuild, S
from composer.lowering.export.whole import Whole, whole_of
from composer.lowering.loaded import BoundRegion
from composer.lowering.partition.by_trial import bind, partition_by_trial
from composer.lowering.trial import try_once
from composer.records import Reason, Status

if TYPE_CHECKING:
    from composer.backends.onnx_engine import OnnxEngine


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    engine: OnnxEngine[S],
    build: OnnxBuild[S],
    key: str,
) -> Callable[..., Any]:
    """Compile a captured graph for an engine. The facts are written to the terms of the build.

    A graph that Dynamo did not capture may return a tensor or a dict; the compiled graph then
    returns the same. Numbers that the program draws are passed in another dtype than they were
    captured in; they are converted.

    Args:
        gm: The graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        engine: The engine.
        build: The terms of the build.
        key: A text of all that decides what the engine takes of a graph, and how. The model of a
            whole graph is kept on disk under it; none is if the text is empty.

    Raises:
        Refusal: the engine can run no part of the graph, or does not work here.
    """
    _torch.symbols.learn_sizes(gm, example_inputs)
    flat, restore = clones.flat_outputs(gm)
    adapt = clones.with_captured_dtypes(gm, example_inputs)
    compiled = _compiled_flat(flat, example_inputs, engine, build, key)
    compiled = _torch.minifier.for_minifier(compiled, flat)
    if adapt is restore is None:
        return compiled

    def run(*args: Any) -> Any:
        adapted = args if adapt is None else adapt(args)
        outputs = compiled(*adapted)
        return outputs if restore is None else restore(outputs)

    return run


def _compiled_flat(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    engine: OnnxEngine[S],
    build: OnnxBuild[S],
    key: str,
) -> Callable[..., Any]:
    """Compile a graph that returns a tuple, or find it on disk."""
    terms = build.terms
    terms.facts.add(engine.facts(build))
    build = dataclasses.replace(build, is_mixed=bool(low_precision.marked(gm.graph)))
    whole = None if build.is_mixed else whole_of(gm, example_inputs, key, terms)
    compiled = None if whole is None else _found(whole, example_inputs, engine, build)
    if compiled is None:

        def compile_one(graph: FunctionalGraph) -> Callable[..., Any]:
            return _compiled(graph, engine, build, whole)

        compiled = compile_functional(gm, example_inputs, compile_one, engine.operators(), terms)
    if artefacts := str(terms.artefacts):
        terms.facts.extra["artefacts"] = artefacts
    return compiled


def _compiled(
    graph: FunctionalGraph,
    engine: OnnxEngine[S],
    build: OnnxBuild[S],
    whole: Whole | None,
) -> Callable[..., Any]:
    """Compile a functional graph."""
    facts = build.terms.facts
    if not engine.trains and graph.kind is not GraphKind.INFERENCE:
        refuse(Status.DECLINED, Reason.TRAINING_GRAPH, only_inference(engine.title))
    inputs = graph.gm.graph.find_nodes(op="placeholder")
    weights = {str(inputs[i].target): weight for i, weight in graph.weights.items()}
    pieces = partition_by_trial(graph, engine, dataclasses.replace(build, weights=weights))
    parts = pieces.parts
    facts.covers(parts.taken, parts.total, parts.left)
    if graph.kind is not GraphKind.BACKWARD:  # a backward may hold nothing but a view
        parts.decline_if_empty()
    _state(facts, pieces.engines.values())
    compiled = parts.assemble(pieces.engines)
    try_once(compiled, graph, parts.written)
    if whole is not None:
        whole.keep(graph, parts, pieces.models)
    return compiled


def only_inference(title: str) -> str:
    """Return the text of the refusal of a training graph."""
    return f"{title} runs inference; under torch.no_grad() the graph is that"


def _found(
    whole: Whole,
    example_inputs: Sequence[Any],
    engine: OnnxEngine[S],
    build: OnnxBuild[S],
) -> Callable[..., Any] | None:
    """Return the compiled graph if an earlier process kept what it becomes; else ``None``.

    If the engine refuses a model here, the graph is compiled as if it had not been kept.
    """
    kept = whole.find(example_inputs)
    if kept is None:
        return None
    parts, models = kept
    engines: dict[str, BoundRegion] = {}
    try:
        for name, region in parts.regions.items():
            read = engine.read(models[name], region, build)
            model = dataclasses.replace(models[name], read=read)
            engines[name] = bind(region, model, engine, build)
    except (NodesRefused, Refusal):
        return None
    build.terms.artefacts.whole = True
    build.terms.facts.covers(parts.taken, parts.total, parts.left)
    _state(build.terms.facts, engines.values())
    return parts.assemble(engines)


def _state(facts: BuildFacts, engines: Iterable[BoundRegion]) -> None:
    """Add the facts of the loaded regions to the facts of the build."""
    for engine in engines:
        facts.add(engine.facts)
        for name, value in engine.sums.items():
            known = facts.extra.get(name)
            if isinstance(value, dict):
                facts.extra[name] = dict(Counter(known or {}) + Counter(value))
            else:
                facts.extra[name] = value if known is None else known + value
