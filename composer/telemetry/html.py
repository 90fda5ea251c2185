"""The record as one HTML file: who runs each graph, why not the others, where time went.

The page asks nothing of the network, and its content security policy forbids it to: only its own
script runs, whatever stands in a message or a model's name.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.records import CompileReport, Reason
from composer.telemetry.page import effects, fallbacks, shares, spent, timeline, times, words
from composer.telemetry.page.timeline import Bar
from composer.telemetry.page.times import Times
from composer.telemetry.recording import Process, Recording

if TYPE_CHECKING:
    from jinja2 import Environment


def render(recordings: Sequence[Recording], means: Callable[[Reason], str] | None = None) -> str:
    """Lay out recordings as a page for a browser, in one file without scripts from elsewhere.

    Args:
        recordings: The processes and their graphs; none at all is fine.
        means: Says in a sentence or two what a reason means; left out without it.

    Returns:
        The text of the file, to be written as UTF-8. Of long messages it has the beginning, of
        long tracebacks the end.
    """
    environment = _environment()
    # What a file gave that is no text, half a surrogate pair, cannot be written as UTF-8.
    page = environment.get_template("report.html.j2").render(
        _parts(recordings),
        means=means or (lambda _: ""),
        script_hash=_hash(_source(environment, "report.js")),
    )
    return page.encode("utf-8", "replace").decode("utf-8")


def is_page(path: Path) -> bool:
    """Whether a file is what :func:`render` gave, or is empty.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(4096).lstrip()
    return not begin or (begin.startswith(b"<!doctype html>") and _TITLE in begin)


_TITLE = b"<title>composer: "
"""Stands in the head of every page."""


@dataclass(frozen=True, slots=True)
class PageGraph:
    """One graph on the page; ``number`` counts from 1 through all processes."""

    number: int
    process: Process
    graph: CompileReport
    bar: Bar


def _parts(recordings: Sequence[Recording]) -> dict[str, Any]:
    """What the template lays out."""
    graphs = tuple(graph for each in recordings for graph in each.report.graphs)
    line = timeline.timeline(graphs)
    lanes = tuple(_lanes(recordings, line.bars))
    served = Counter(graph.chosen for graph in graphs)
    return {
        "graphs": graphs,
        "lanes": lanes,
        "line": line,
        "served": served.most_common(),
        "seconds": sum(words.sane(graph.seconds) for graph in graphs),
        "shares": shares.shares(graphs),
        "measured": tuple(_measured(each for _, entries in lanes for each in entries)),
        "engines": shares.engines(graphs),
        "fallbacks": fallbacks.fallbacks(graphs),
        "traces": fallbacks.traces(graphs),
        "effects": effects.effects(graphs),
        "spent": spent.spent(bar.pieces for bar in line.bars),
    }


def _lanes(
    recordings: Iterable[Recording], bars: Sequence[Bar]
) -> Iterable[tuple[Process, tuple[PageGraph, ...]]]:
    """The graphs of each process, numbered."""
    number = 0
    for each in recordings:
        entries = []
        for graph in each.report.graphs:
            entries.append(PageGraph(number + 1, each.process, graph, bars[number]))
            number += 1
        yield each.process, tuple(entries)


def _measured(entries: Iterable[PageGraph]) -> Iterator[tuple[PageGraph, Times]]:
    """The graphs whose engines were measured, with their times."""
    for each in entries:
        found = times.times(each.graph)
        if found is not None:
            yield each, found


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("composer.telemetry", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = (
        "clock",
        "counted",
        "cut",
        "duration",
        "head",
        "moment",
        "said",
        "short",
        "tail",
    )
    environment.filters |= {name: getattr(words, name) for name in names}
    environment.filters["fact"] = shares.fact
    return environment


def _source(environment: Environment, name: str) -> str:
    """A file as ``include`` puts it into the page."""
    return environment.get_template(name).render()


def _hash(script: str) -> str:
    """How a content security policy names the one script that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
