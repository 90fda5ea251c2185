"""The stages ``torch`` and ``aten``, which composer runs once, before it tries any candidate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch.fx

from composer import _torch
from composer.graphs import clones
from composer.passes import metadata
from composer.passes.base import GraphPass
from composer.passes.canonical import to_aten
from composer.passes.pipeline import Check, Pipeline
from composer.passes.resolve import SharedPasses
from composer.records import BEFORE_AUTOGRAD, GraphRequest, PassRecord, Stage
from composer.system import control_flow


def rewrite(
    request: GraphRequest,
    shared: SharedPasses,
    at_aten: Callable[[GraphRequest], torch.fx.GraphModule] | None = None,
    check: Check | None = None,
) -> tuple[GraphRequest, tuple[PassRecord, ...]]:
    """Run the passes of the stages ``torch`` and ``aten``.

    Args:
        request: The graph.
        shared: The passes.
        at_aten: Returns a copy of the graph in canonical ATen; used if such a graph may exist
            already. By default the graph is traced.
        check: Compares numbers; called after each pass that changed the graph.

    Returns:
        The request with the rewritten graph, and the record of each pass. If no pass changed the
        graph, it is the captured graph itself.

    Raises:
        PassError: A pass failed, and the policy says ``on_pass_error = "raise"``.
    """
    pipeline = Pipeline(shared.on_error, check=check)
    for stage in BEFORE_AUTOGRAD:
        copy = at_aten if at_aten and stage == Stage.ATEN else functools.partial(_copy_for, stage)
        request = _run_stage(request, copy, shared.at(stage), pipeline)
    return request, tuple(pipeline.records)


def _run_stage(
    request: GraphRequest,
    copy: Callable[[GraphRequest], torch.fx.GraphModule],
    passes: tuple[GraphPass, ...],
    pipeline: Pipeline,
) -> GraphRequest:
    if not passes:
        return request
    try:
        with _torch.modes.restored_modes():
            gm = copy(request)
    except BaseException as error:  # noqa: BLE001  # recorded, or raised where the policy says so
        control_flow.pass_on(error)
        pipeline.fail(passes, "stage", error)
        return request
    earlier = len(pipeline.records)
    if not pipeline.run(gm, passes):
        return request
    _torch.sources.name_sources(gm)
    torch_gm = gm if passes[0].stage == Stage.TORCH else request.torch_gm
    for each, record in zip(passes, pipeline.records[earlier:], strict=True):
        if each.stage == Stage.ATEN and record.changed and not each.keeps_numbers:
            torch_gm = None
    return dataclasses.replace(request, gm=gm, torch_gm=torch_gm)


def _copy_for(stage: Stage, request: GraphRequest) -> torch.fx.GraphModule:
    """Return a copy of the graph in the IR of a stage."""
    if stage == Stage.ATEN:
        return to_aten(request.gm, request.example_inputs)
    gm = clones.clone_graph(request.gm, _torch.sources.lazy_graph_module)
    metadata.fill(gm, request.example_inputs, metadata.key_at(stage))
    return gm
