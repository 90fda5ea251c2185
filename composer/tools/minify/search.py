"""Looks for the smallest program that still shows a fault, by delta debugging.

The algorithm is ``ddmin`` by Zeller and Hildebrandt (https://doi.org/10.1109/32.988498): chunks of
a list are taken out, first all, then halves, at last single entries.

Torch has such a search as well (``torch._functorch.fx_minifier``). It keeps the values of all nodes
in memory, changes neither sizes nor values, and cannot be told to stop.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from composer.errors import ReproError, error_line
from composer.system import control_flow
from composer.tools.minify import programs
from composer.tools.minify.programs import Program

Shows = Callable[[torch.fx.GraphModule, Sequence[Any]], bool]
"""Returns True if a graph on these inputs shows the fault. It may change the graph."""


@dataclass(frozen=True)
class Minified:
    """What a search has found.

    Attributes:
        program: The smallest program.
        tries: How many programs were tried.
        is_complete: False if the time was up before the search was over.
    """

    program: Program
    tries: int
    is_complete: bool


def smallest(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    shows: Shows,
    *,
    found: Callable[[Program, int], object] = lambda program, tries: None,
    until: float = math.inf,
) -> Minified:
    """Return the smallest program that still shows a fault.

    Each program that is tried runs in eager mode first. One that raises there does not count.

    Args:
        gm: The graph, with weights as inputs. It is not changed.
        inputs: The values of its placeholders, which are not changed.
        shows: Says if a graph shows the fault.
        found: Called with each smaller program, and with the number of tries so far.
        until: The time of ``time.monotonic()`` at which the search ends.

    Raises:
        ReproError: the graph itself does not show the fault, or does not run in eager mode.
    """
    search = _Search(Program.of(gm, inputs), shows, found, until)
    with contextlib.suppress(_TimeIsUp):
        search.run()
        return Minified(search.best, search.tries, is_complete=True)
    return Minified(search.best, search.tries, is_complete=False)


def first_wrong(program: Program, shows: Shows) -> torch.fx.Node | None:
    """Return the first call of a program that shows the fault if the program ends there."""
    for call in program.calls:
        ending = programs.only_returning(program, call)
        if isinstance(program.values([call])[call], torch.Tensor) and shows(
            ending.gm, ending.inputs
        ):
            return call
    return None


class _TimeIsUp(Exception):
    """The search has to end."""


class _Search:
    """A search, with the best program so far."""

    def __init__(
        self,
        best: Program,
        shows: Shows,
        found: Callable[[Program, int], object],
        until: float,
    ) -> None:
        self.best = best
        self.tries = 0
        self._shows = shows
        self._found = found
        self._until = until

    def run(self) -> None:
        """Make the program smaller until nothing helps."""
        try:
            self.best.values()
        except Exception as error:
            raise ReproError(f"the graph fails in eager mode: {error_line(error)}") from error
        if not self._shows_fault(self.best):
            raise ReproError("the graph does not show the fault")
        while self._drop_all():
            pass
        self._shrink()
        for position in range(len(self.best.inputs)):
            any(self._take(programs.with_fill, self.best, position, f) for f in programs.FILLS)

    def _drop_all(self) -> bool:
        """Take out calls and outputs; return True if any went."""
        is_smaller = [
            self._drop(lambda: len(self.best.calls), programs.without_calls),
            self._drop(lambda: len(self.best.outputs), programs.without_outputs),
        ]
        return any(is_smaller)

    def _drop(self, count: Callable[[], int], without: Callable[..., Program]) -> bool:
        """Take out chunks, from the last to the first; return True if any went."""
        before = size = count()
        while size:
            for last in range(count(), 0, -size):
                self._take(without, self.best, max(last - size, 0), last)
            size //= 2
        return count() < before

    def _shrink(self) -> None:
        """Make the sizes of inputs smaller, the largest first."""
        left = sorted(programs.sizes(self.best))
        while left:
            old = left.pop()
            for new in sorted({1, 2, old // 2} - {old}):
                if self._resize(old, new):
                    left = sorted({*left, new} - {1})
                    break

    def _resize(self, old: int, new: int) -> bool:
        return any(
            self._take(programs.with_size, self.best, old, new, also_arguments=also)
            for also in (True, False)
        )

    def _take(self, change: Callable[..., Program], *arguments: Any, **named: Any) -> bool:
        """Make a change to the best program, if the result still shows the fault."""
        if time.monotonic() > self._until:
            raise _TimeIsUp
        try:
            program = change(*arguments, **named)
            program.values()
        except Exception as error:  # noqa: BLE001  # such a program is not counted
            control_flow.pass_on(error)
            return False
        if not self._shows_fault(program):
            return False
        self.best = program
        self._found(program, self.tries)
        return True

    def _shows_fault(self, program: Program) -> bool:
        self.tries += 1
        return self._shows(Program.of(program.gm, ()).gm, program.inputs)
