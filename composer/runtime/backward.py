"""What happens when a compiled backward raises: AOTAutograd's own graph of it answers, if possible.

A backward runs outside of the call, in autograd. AOTAutograd makes every backward that an engine
compiles, and keeps the graph it was compiled from; so the guard is put around the compiled backward
as it is made. That adds nothing to a call, and 0.15 us for each argument to a backward.

Gradients of several outputs at once (``is_grads_batched``, a vectorized Jacobian) are that graph's,
too: it is called once for all of them, and an engine has no such tensors.
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

    Until :meth:`serve` is called, errors pass through: while the candidate is tried, and where the
    policy wants errors.
    """

    def __init__(self) -> None:
        self._told: Told | None = None
        self._answers = False

    def serve(self, told: Told, *, answers: bool) -> None:
        """From now on report errors, and have torch answer in the engine's place.

        Args:
            told: Called with each error, and whether torch has answered.
            answers: Whether torch may answer at all.
        """
        self._told, self._answers = told, answers

    def guard(self, built: _torch.backwards.BuiltBackward) -> Callable[[list[Any]], Any]:
        """What autograd is to call in place of a compiled backward.

        Where a compiled function calls ``backward``, Dynamo looks at what autograd calls as well:
        one ``torch.compiler.disable`` is enough for this and for the engine's callable within.
        """
        compiled = _torch.breaks.undisabled(built.compiled)
        # AOTAutograd keeps the graph as it was before the passes of that stage.
        passes = current_build().late
        stale = passes is not None and passes.rewrites(Stage.POST_GRAD) and not built.exact

        def run(args: list[Any]) -> Any:
            graph = built.graph() if not stale and _torch.tensors.any_batched(args) else None
            if graph is not None:
                return _torch.sources.settled_forward(graph)(*args)
            if built.donated and _torch.backwards.keeps_graph():  # what is saved is read again
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
        """The gradients; ``None`` where torch cannot answer, and the error is to be raised."""
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
    """The versions of the arguments: they tell whether the engine removed one, or wrote to one.

    ``None`` where one is an inference tensor, which has no version.
    """
    try:
        return [getattr(each, "_version", None) for each in args]
    except RuntimeError:
        return None


def _repeatable(graph: torch.fx.GraphModule, *, donated: bool) -> bool:
    """Whether a backward that stopped half-way has changed nothing, and can be run again."""
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return not (donated or writes.may_write(graph) or any(map(_torch.operators.draws, targets)))


@contextmanager
def watched() -> Iterator[Backwards]:
    """Guard the backwards that are compiled within."""
    backwards = Backwards()
    with _torch.backwards.backwards_by(backwards.guard):
        yield backwards
