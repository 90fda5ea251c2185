"""Renders records as one HTML file: which engine runs each graph, why not others, and the times.

The page does not use the network, and its content security policy forbids it. Only the page's own
script can run, even if a message or a model's name contains HTML.
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
from composer.telemetry.html import effects, fallbacks, shares, spent, timeline, times, words
from composer.telemetry.html.timeline import Bar
from composer.telemetry.html.times import Times
from composer.telemetry.recording import Process, Recording
from composer.telemetry.report import counted, ratio_text

if TYPE_CHECKING:
    from jinja2 import Environment


def render(recordings: Sequence[Recording], means: Callable[[Reason], str] = lambda _: "") -> str:
    """Render recordings as an HTML page in one file.

    Args:
        recordings: The processes and their graphs; may be empty.
        means: Returns the meaning of a reason in a sentence or two. Without it the page does not
            explain reasons.

    Returns:
        The text of the file, to be written as UTF-8. Only the beginning of a long message is
        included, and only the end of a long traceback.
    """
    environment = _environment()
    script = environment.get_template("report.js").render()  # as ``include`` puts it into the page
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # A file of records can contain half of a surrogate pair, which UTF-8 cannot encode.
    page = environment.get_template("report.html.j2").render(
        _parts(recordings),
        means=means,
        script_hash=f"sha256-{digest}",
    )
    return page.encode("utf-8", "replace").decode("utf-8")


def is_page(path: Path) -> bool:
    """Return true if a file is a page from :func:`render`, or is empty.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(4096).lstrip()
    return not begin or (begin.startswith(b"<!doctype html>") and _TITLE in begin)


_TITLE = b"<title>composer: "
"""The start of the title of every page."""


@dataclass(frozen=True, slots=True)
class PageGraph:
    """One graph on the page; ``number`` counts from 1 through all processes."""

    number: int
    process: Process
    graph: CompileReport
    bar: Bar


_Lane = tuple[Process, tuple[PageGraph, ...]]


def _parts(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the variables of the template."""
    graphs = tuple(graph for each in recordings for graph in each.report.graphs)
    line = timeline.timeline(graphs)
    lanes = tuple(_lanes(recordings, line.bars))
    return {
        "graphs": graphs,
        "lanes": lanes,
        "line": line,
        "written": max((each.written for each in recordings), default=""),
        "served": Counter(graph.chosen for graph in graphs).most_common(),
        "seconds": sum(words.sane(graph.seconds) for graph in graphs),
        "shares": shares.shares(graphs),
        "measured": tuple(_measured(lanes)),
        "engines": shares.engines(graphs),
        "fallbacks": fallbacks.fallbacks(graphs),
        "traces": fallbacks.traces(graphs),
        "effects": effects.effects(graphs),
        "spent": spent.spent(bar.pieces for bar in line.bars),
    }


def _lanes(recordings: Iterable[Recording], bars: Sequence[Bar]) -> Iterator[_Lane]:
    """Yield each process with its graphs, numbered."""
    numbered_bars = enumerate(bars, start=1)
    for recording in recordings:
        entries = []
        for graph in recording.report.graphs:
            number, bar = next(numbered_bars)
            entries.append(PageGraph(number, recording.process, graph, bar))
        yield recording.process, tuple(entries)


def _measured(lanes: Iterable[_Lane]) -> Iterator[tuple[PageGraph, Times]]:
    """Yield the graphs whose engines were measured, with their times."""
    for _, entries in lanes:
        for entry in entries:
            measured = times.times(entry.graph)
            if measured is not None:
                yield entry, measured


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("composer.telemetry", "html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("clock", "cut", "duration", "head", "input_text", "moment", "short", "tail")
    environment.filters |= {name: getattr(words, name) for name in names}
    environment.filters |= {"fact": shares.fact, "ratio": ratio_text, "counted": counted}
    return environment
