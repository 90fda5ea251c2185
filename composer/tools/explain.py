"""Explains how a model runs: its graphs, the engines that serve them, and its graph breaks."""

from __future__ import annotations

import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from composer import _torch, session
from composer.dispatch import compose
from composer.errors import first_line
from composer.graphs import capture
from composer.records import Attempt, CompileReport, PassRecord, plain
from composer.telemetry.report import Report, attempts_of, counted


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place where Dynamo ended a graph, or gave up on a function."""

    reason: str
    """Dynamo's name for the reason, such as ``Data-dependent branching``."""
    file: str
    """The file of the user's code."""
    line: int
    """The line in the file, counted from 1."""
    code: str
    """The text of the line; empty if it cannot be read."""
    message: str
    """Dynamo's full message: explanation, hints, a link."""
    frame_skipped: bool
    """True if Dynamo gave up the whole function, which then runs as plain Python and not in graphs
    before and after the line; with ``fullgraph=True`` the compile ended in an error."""

    def __str__(self) -> str:
        """Return the place, its text, and what Dynamo says, without its debugging lines."""
        skipped = "  (the whole function was given up)" if self.frame_skipped else ""
        lines = [f"{self.file}:{self.line}{skipped}"]
        if self.code:
            lines.append(f"  {self.code}")
        message = self.message.partition("\n\n  Developer debug context")[0]
        lines += [f"    {line}" for line in message.splitlines() if line.strip()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Report):
    """The compiled graphs, oldest first, and the graph breaks; ``str()`` gives a text."""

    graph_breaks: tuple[GraphBreak, ...] = ()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every candidate tried on every graph."""
        return tuple(attempts_of(self.graphs))

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        """Every shared pass run over every graph."""
        return tuple(each for graph in self.graphs for each in graph.passes)

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"graphs": [...], "graph_breaks": [...], "without_graph": [...]}``.

        Each graph's record is in schema version 1.
        """
        return {
            "graphs": plain(self.graphs),
            "graph_breaks": plain(self.graph_breaks),
            "without_graph": plain(self.without_graph),
        }

    def _headline(self) -> str:
        return f"{Report._headline(self)}; {counted(len(self.graph_breaks), 'graph break')}"

    def _details(self, graph: CompileReport) -> Iterator[str]:
        """Yield what the engines left to torch."""
        for attempt in graph.attempts:
            left = attempt.engine.get("left_to_torch", ())
            if left:
                yield f"   {attempt.backend} leaves to torch:"
                yield from (f"     {line}" for line in left)

    def _notes(self) -> Iterator[str]:
        """Yield the graph breaks, and what has no graph for another cause."""
        for each in self.graph_breaks:
            yield f"graph break  {each}"
        places = {(each.file, each.line) for each in self.graph_breaks}
        for case in self.without_graph or ():
            if (case.file, case.line) not in places:
                yield f"no graph of {case}"


class Collector:
    """A sink that keeps the live report of every graph, and the graph breaks.

    Args:
        thread: Keep only those of this thread.
    """

    def __init__(self, thread: int | None = None) -> None:
        self._thread = thread
        self._graphs: list[CompileReport] = []
        self._breaks: dict[tuple[str, int, str], GraphBreak] = {}
        self._noted_before = session.current().noted

    @property
    def explanation(self) -> Explanation:
        """Return the explanation of everything collected so far, with the current reports."""
        here = session.current()
        graphs = here.as_they_stand(self._graphs)
        without = here.without_graph(self._noted_before)
        return Explanation(tuple(graphs), without, graph_breaks=tuple(self._breaks.values()))

    def emit(self, record: dict[str, Any]) -> None:
        """Do nothing: :meth:`follow` keeps the live report instead of its record."""

    def follow(self, report: CompileReport) -> None:
        """Keep a graph's report."""
        if self._is_followed():
            self._graphs.append(report)

    def met(
        self, message: str, stack: Sequence[traceback.FrameSummary], frame_skipped: bool
    ) -> None:
        """Keep a graph break; a second message about the same place replaces the first.

        Dynamo meets a place again when it gives up on a caller and traces the function alone.
        """
        if not self._is_followed():
            return
        place = capture.users_frame(stack)
        key = place.filename, place.lineno or 0, first_line(message)
        known = self._breaks.get(key)
        if known is not None and known.frame_skipped:
            frame_skipped = True
        file, line, reason = key
        self._breaks[key] = GraphBreak(reason, file, line, place.line or "", message, frame_skipped)

    def _is_followed(self) -> bool:
        return self._thread in (None, threading.get_ident())


@contextmanager
def collecting(thread: int | None = None) -> Iterator[Collector]:
    """Collect all that is compiled through composer, and every graph break, until the block ends.

    Args:
        thread: Only what this thread compiles; by default all threads.
    """
    collector = Collector(thread)
    session.add_sink(collector)
    try:
        with _torch.breaks.graph_breaks_to(collector.met):
            yield collector
    finally:
        session.remove_sink(collector)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Compile a function or a module through composer, call it once, and say what happened.

    The call is a real one, so ``fn`` may write to its arguments. ``fn`` is compiled anew under the
    policy in force, with a backend of its own; earlier compiles are kept, but are not used. The
    graphs also join :func:`composer.reports`.

    Args:
        fn: A function, a module, or one that ``torch.compile`` gave back for
            ``backend="composer"``; the latter keeps its ``mode``, ``options``, ``dynamic`` and
            ``fullgraph``.
        args: For ``fn``.
        kwargs: For ``fn``.

    Raises:
        ValueError: ``fn`` is compiled with another backend.
        Exception: whatever ``fn`` or its compile raises, with a note of what was compiled.
    """
    compiled = _as_before(fn)
    _torch.breaks.forget_given_up()
    with collecting(threading.get_ident()) as collector:
        try:
            compiled(*args, **kwargs)
        except Exception as error:
            error.add_note(f"composer.explain had seen so far:\n{collector.explanation}")
            raise
    return collector.explanation


def compiled_beside(fn: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Compile a function through composer without reusing, or being reused by, other compiles.

    The backend is a new object, so that Dynamo finds nothing in its caches.

    Args:
        fn: A function or a module.
        settings: For ``torch.compile``.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        # Without it (torch < 2.13) the compile counts towards the function's recompile limit:
        # https://github.com/pytorch/pytorch/pull/178351
        settings["isolate_recompiles"] = True
    return torch.compile(fn, backend=functools.partial(compose), **settings)


def _as_before(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function anew, with the arguments of an earlier ``torch.compile`` if any."""
    before = _torch.breaks.compiled_as(fn)
    if before is None:
        return compiled_beside(fn)
    if before.backend is not compose:
        raise ValueError(
            f"{fn!r} is compiled with backend={before.name!r}, of which composer knows nothing; "
            'explain the function itself, or one compiled with backend="composer"'
        )
    return compiled_beside(
        before.original,
        dynamic=before.dynamic,
        fullgraph=before.fullgraph,
        mode=before.mode,
        options=before.options,
    )
