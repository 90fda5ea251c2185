"""The eager fallback, for when no engine serves: the captured graph with the later passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer import _torch
from composer.errors import PassError
from composer.graphs import checkpoints, clones, sharing
from composer.lowering.each import compile_each
from composer.passes.resolve import SharedPasses
from composer.passes.within_aotautograd import LatePasses
from composer.records import EAGER, GraphRequest, PassRecord
from composer.system import control_flow


def make_fallback(
    request: GraphRequest, shared: SharedPasses
) -> tuple[Callable[..., Any], tuple[PassRecord, ...]]:
    """Return the eager fallback of a graph, and the records of the passes that ran within it.

    Raises:
        PassError: a pass failed, and the policy says ``on_pass_error = "raise"``.
    """
    passes = LatePasses(shared, EAGER)
    return _fallback(request, passes), passes.records


def _fallback(request: GraphRequest, passes: LatePasses) -> Callable[..., Any]:
    """Return the graph's own forward or, with later passes, that of AOTAutograd's graphs.

    If AOTAutograd cannot make its graphs, the passes are recorded as not run.
    """
    eager = checkpoints.eager_forward(request.gm)
    if not passes.shared.late:
        return eager
    gm = clones.clone_graph(request.gm)
    try:
        sharing.decline_shared(request)
        with _torch.modes.restored_modes():
            compiled = compile_each(
                gm,
                request.example_inputs,
                passes,
                lambda functional, _: _torch.sources.settled_forward(functional),
            )
        return sharing.watched(compiled, request, eager)
    except _torch.dynamo.DYNAMO_CONTROL_FLOW:
        raise
    except PassError:
        raise
    except BaseException as error:  # noqa: BLE001  # recorded; the eager fallback always answers
        control_flow.pass_on(error)
        passes.fail(error)
        return eager
