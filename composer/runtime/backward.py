"""Guards compiled backwards: if one raises, torch computes the gradients in its place, if possible.

A backward does not run within the call of the graph. Autograd runs it later. AOTAutograd makes an
FX graph of each backward, gives it to the engine to compile, and keeps it. When the engine has
compiled a backward, :meth:`Backwards.guard` wraps the result. The wrapper calls the engine. It runs
the kept FX graph instead in two cases:

- The engine raised, and its arguments are as they were before. The served graph is told of the
  error, so the next call of the forward has another engine.
- The gradients are batched (``is_grads_batched``, a vectorized Jacobian). Engines cannot take
  batched tensors.

The wrapper costs 0.15 us for each argument of a backward, and nothing at a call of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.build import current_build
from composer.graphs import clones, writes
from composer.records import Stage
from composer.system import control_flow
from composer.system.memory import free_memory, lacks_memory

NOTE = (
    "composer: an engine's backward raised, and its arguments are gone or changed, so torch cannot "
    "compute the gradients; the next call of its forward has another engine"
)

Report = Callable[[BaseException, bool], None]


class Backwards:
    """The compiled backwards of one engine.

    While the candidate is tried, errors of a backward reach the caller. :meth:`serve` ends that.
    """

    def __init__(self) -> None:
        self._report: Report | None = None
        self._recovers = False

    def serve(self, report: Report, *, recovers: bool) -> None:
        """Report errors from now on, and let torch compute the gradients in the engine's place.

        Args:
            report: Called with each error, and with True if torch computed the gradients.
            recovers: False if errors have to reach the caller all the same.
        """
        self._report, self._recovers = report, recovers

    def guard(self, built: _torch.backwards.BuiltBackward) -> Callable[[list[Any]], Any]:
        """Return the function that autograd calls in place of a compiled backward.

        If a compiled function calls ``backward``, Dynamo would trace it. It must not, and one
        ``torch.compiler.disable`` is enough for the guard and the engine's callable within.
        """
        compiled = _torch.breaks.undisabled(built.compiled)
        # AOTAutograd keeps the graph as it was before the passes of that stage.
        passes = current_build().late
        is_stale = passes is not None and passes.rewrites(Stage.POST_GRAD) and not built.exact

        def run(args: list[Any]) -> Any:
            if not is_stale and _torch.tensors.any_batched(args):
                graph = built.graph()
                if graph is not None:
                    return _torch.sources.settled_forward(graph)(*args)
            # With retain_graph, a later backward reads the saved tensors again: donate copies.
            if built.donated and _torch.backwards.keeps_graph():
                args[:] = clones.copy_inputs(args, keep=set(range(len(args))) - set(built.donated))
            before = _versions(args)
            try:
                return compiled(args)
            except BaseException as error:
                control_flow.pass_on(error)
                if self._report is None:
                    raise
                is_intact = before is not None and _versions(args) == before
                graph = built.graph() if self._recovers and is_intact and not is_stale else None
                if graph is None or built.donated or not _is_repeatable(graph):
                    if self._recovers:
                        error.add_note(NOTE)
                    self._report(error, False)
                    raise
                if lacks_memory(error):
                    free_memory()
                gradients = _torch.sources.settled_forward(graph)(*args)
                self._report(error, True)
                return gradients

        return _torch.aot.takes_a_list(_torch.breaks.disabled(run))


def _versions(args: list[Any]) -> list[int | None] | None:
    """Return the versions of the arguments; ``None`` if one is an inference tensor.

    They show whether the engine has removed an argument from the list, or written to one.
    """
    try:
        return [getattr(each, "_version", None) for each in args]
    except RuntimeError:
        return None


def _is_repeatable(graph: torch.fx.GraphModule) -> bool:
    """Return True if a backward that stopped half-way can be run again with the same result."""
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return not writes.may_write(graph) and not any(map(_torch.operators.draws, targets))


@contextmanager
def watched() -> Iterator[Backwards]:
    """Guard the backwards that are compiled in this context."""
    backwards = Backwards()
    with _torch.backwards.backwards_by(backwards.guard):
        yield backwards
