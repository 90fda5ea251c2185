"""The eager fallback, for when no engine serves: the captured graph with the later passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from composer import _torch
from composer.errors import PassError
from composer.graphs import capture, checkpoints, clones, sharing
from composer.lowering.each import compile_each
from composer.passes.resolve import SharedPasses
from composer.passes.within_aotautograd import LatePasses
from composer.records import EAGER, GraphRequest, PassRecord
from composer.system import control_flow

Made = tuple[Callable[..., Any], tuple[PassRecord, ...]]
"""A callable for a graph, and the shared passes that ran within it."""


class EagerFallback:
    """The eager fallback of one graph. It is made once, when somebody first needs it.

    Without passes of the later stages it is the captured graph's own forward. ``passes`` are the
    records of those that ran within it.

    Args:
        request: The graph. Its example inputs are not kept.
        shared: The passes of the later stages.
    """

    def __init__(self, request: GraphRequest, shared: SharedPasses) -> None:
        self._graph = capture.without_tensors(request)
        self.shared = shared
        self.passes: tuple[PassRecord, ...] = ()
        self._run: Callable[..., Any] | None = None
        if not shared.late:
            self._run = checkpoints.eager_forward(request.gm)

    @property
    def run(self) -> Callable[..., Any]:
        """The callable itself if it is made already, else one that makes it at its first call."""
        return self._run or self

    def __call__(self, *args: Any) -> Any:
        """Answer a call."""
        return self.made_for(args)(*args)

    def made_for(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Return the callable. If it has to be compiled, these are the inputs."""
        if self._run is None:
            with _torch.compiles.recaptured(self._graph.gm, args):
                return self.made(capture.for_call(self._graph, args))[0]
        return self._run

    def made(self, request: GraphRequest) -> Made:
        """Return the callable, and the records of the passes that ran within it.

        If it has to be compiled, this is a compile, with these example inputs.
        """
        if self._run is None:
            self._run, self.passes = make_fallback(request, self.shared)
        return self._run, self.passes

    def adopt(self, run: Callable[..., Any]) -> None:
        """Take what the chain's own ``eager`` has compiled."""
        self._run = _torch.breaks.undisabled(run)


def make_fallback(request: GraphRequest, shared: SharedPasses) -> Made:
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
