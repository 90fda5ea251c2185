"""Guards compiled backwards: if one raises, AOTAutograd's graph of it answers, if possible.

A backward runs outside of the call, in autograd. AOTAutograd makes the graph of every backward that
an engine compiles, and keeps it. The guard is put around the compiled backward when it is made.
This costs nothing at a call of the forward, and 0.15 us for each argument at a backward.

That graph also computes batched gradients (``is_grads_batched``, a vectorized Jacobian), because
engines cannot take batched tensors.
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
    "composer: an engine's backward raised, and what it was given is gone or changed, so nobody "
    "can answer; the next call of its forward has another engine"
)

Told = Callable[[BaseException, bool], None]


class Backwards:
    """The backwards of one engine.

    Until :meth:`serve` is called, errors reach the caller. That is the case while the candidate is
    tried.
    """

    def __init__(self) -> None:
        self._told: Told | None = None
        self._answers = False

    def serve(self, told: Told, *, answers: bool) -> None:
        """Report errors from now on, and let torch answer in the engine's place.

        Args:
            told: Called with each error, and with True if torch has answered.
            answers: True if torch may answer at all.
        """
        self._told, self._answers = told, answers

    def guard(self, built: _torch.backwards.BuiltBackward) -> Callable[[list[Any]], Any]:
        """Return the function that autograd calls in place of a compiled backward.

        If a compiled function calls ``backward``, Dynamo would trace it. It must not, and one
        ``torch.compiler.disable`` is enough for the guard and the engine's callable within.
        """
        compiled = _torch.breaks.undisabled(built.compiled)
        # AOTAutograd keeps the graph as it was before the passes of that stage.
        passes = current_build().late
        stale = passes is not None and passes.rewrites(Stage.POST_GRAD) and not built.exact

        def run(args: list[Any]) -> Any:
            graph = built.graph() if not stale and _torch.tensors.any_batched(args) else None
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
                if self._told is None:
                    raise
                intact = before is not None and _versions(args) == before
                gradients = self._answer(error, built, args, usable=intact and not stale)
                if gradients is None:
                    raise
                return gradients

        return _torch.aot.takes_a_list(_torch.breaks.disabled(run))

    def _answer(
        self,
        error: BaseException,
        built: _torch.backwards.BuiltBackward,
        args: list[Any],
        *,
        usable: bool,
    ) -> Any:
        """Return the gradients; ``None`` if torch cannot answer and the error has to be raised."""
        told = self._told
        graph = built.graph() if usable and self._answers else None
        if told is None or graph is None or not _repeatable(graph, donated=bool(built.donated)):
            if told is not None:
                if self._answers:
                    error.add_note(NOTE)
                told(error, False)
            return None
        if lacks_memory(error):
            free_memory()
        gradients = _torch.sources.settled_forward(graph)(*args)  # raises the program's own errors
        told(error, True)
        return gradients


def _versions(args: list[Any]) -> list[int | None] | None:
    """Return the versions of the arguments; ``None`` if one is an inference tensor.

    They show whether the engine has removed an argument from the list, or written to one.
    """
    try:
        return [getattr(each, "_version", None) for each in args]
    except RuntimeError:
        return None


def _repeatable(graph: torch.fx.GraphModule, *, donated: bool) -> bool:
    """Return True if a backward that stopped half-way can be run again with the same result."""
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return not (donated or writes.may_write(graph) or any(map(_torch.operators.draws, targets)))


@contextmanager
def watched() -> Iterator[Backwards]:
    """Guard the backwards that are compiled in this context."""
    backwards = Backwards()
    with _torch.backwards.backwards_by(backwards.guard):
        yield backwards
