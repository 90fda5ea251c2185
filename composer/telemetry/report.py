"""The report for people: which engine runs each graph, and why the others do not."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from composer.errors import first_line
from composer.records import (
    Attempt,
    CompileReport,
    Counters,
    PassRecord,
    WithoutGraph,
    plain,
    printable,
    spelled,
)
from composer.telemetry.progress import Step

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 110

_SHORT = 10
"""The largest number of graphs in a short report, which ends with a hint."""

ENOUGH_ROUNDS = 7
"""With fewer rounds a ratio has two digits and no spread, and a policy does not fix an engine."""

UNDER_LOAD = "; measured under a load"

_COMPARES = 'options={"chain": "auto", "select": "fastest"}'


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The reports of several compiles, oldest first. ``str()`` gives a table."""

    graphs: tuple[CompileReport, ...]
    without_graph: tuple[WithoutGraph, ...] | None = None
    """Functions and modules that were compiled, but of which Dynamo captured no graph; ``None`` if
    that is not known."""
    untried: tuple[str, ...] = ()
    """Engines that are installed but were not tried."""
    under_way: tuple[Step, ...] = ()
    """What is being compiled or measured now, also in the background."""

    def __str__(self) -> str:
        """Return a text with every graph, the engine that serves it, and its attempts."""
        lines = [self._headline()]
        for graph in self.graphs:
            lines += ["", *_tables(graph), *self._details(graph)]
        lines += [f"\n{note}" for note in self._notes()]
        is_short = len(self.graphs) <= _SHORT
        if self.untried and is_short:
            lines.append(f"\n{untried(self.untried, _COMPARES)}")
        return "\n".join(lines).rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the report as HTML for a notebook, which adds its own style for tables."""
        lines = [f"<p><strong>{escape(self._headline())}</strong></p>"]
        notes = []
        for graph in self.graphs:
            heading = escape(_title(graph)).replace("\n", "<br>")
            lines.append(f"<p>{heading}</p>")
            if graph.passes:
                lines.append(_html_table(_PASS_COLUMNS, _pass_rows(graph.passes)))
            lines.append(_html_table(_ATTEMPT_COLUMNS, _attempt_rows(graph.attempts)))
            notes.append("\n".join(self._details(graph)))
        notes += self._notes()
        lines += [f"<pre>{escape(note)}</pre>" for note in notes if note]
        return "\n".join(lines)

    def _headline(self) -> str:
        """Return a line with the number of graphs, the compile time, and the serving engines."""
        if not self.graphs:
            return "composer: nothing was compiled"
        chosen = Counter(graph.chosen or "nobody" for graph in self.graphs)
        engines = ", ".join(f"{printable(name)} {count}" for name, count in chosen.most_common())
        time = f"{sum(graph.seconds for graph in self.graphs):.2f} s"
        graphs = counted(len(self.graphs), "graph")
        return f"composer: {graphs} in {time}{self._waits()}, served by: {engines}"

    def _waits(self) -> str:
        """Return a text such as ``" (calls waited 2 times, 1.34 s in all)"``; empty if unknown."""
        for_compiles = [graph.waited for graph in self.graphs if graph.waited is not None]
        later = [graph.runtime.read() for graph in self.graphs]
        times = len(for_compiles) + sum(each.waits for each in later)
        if not times:
            return ""
        seconds = sum(for_compiles) + sum(each.waited for each in later)
        return f" (calls waited {counted(times, 'time')}, {seconds:.2f} s in all)"

    def _details(self, graph: CompileReport) -> Iterable[str]:
        """Return lines to add below the tables of a graph."""
        return ()

    def _notes(self) -> Iterable[str]:
        """Return texts to add below all graphs."""
        return [
            *(f"no graph of {each}" for each in self.without_graph or ()),
            *(f"now: {each}" for each in self.under_way),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"graphs": [...], "without_graph": [...]}``, with records of schema version 1.

        The key ``without_graph`` is missing if its value is not known.
        """
        graphs = {"graphs": plain(self.graphs)}
        if self.without_graph is None:
            return graphs
        return graphs | {"without_graph": plain(self.without_graph)}

    def to_json(self, indent: int | None = None) -> str:
        """Return the result of :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)


def attempts_of(graphs: Iterable[CompileReport]) -> Iterator[Attempt]:
    """Yield the attempts of all graphs."""
    for graph in graphs:
        yield from graph.attempts


def untried(engines: Iterable[str], compares: str) -> str:
    """Return the hint that names installed engines that were not tried, and how to compare them."""
    return f"installed and not tried: {', '.join(engines)}; {compares} compares them"


def _tables(graph: CompileReport) -> Iterator[str]:
    """Yield the title of a graph, the table of its passes, and the table of its attempts."""
    yield _title(graph)
    if graph.passes:
        yield _table(_PASS_COLUMNS, _pass_rows(graph.passes))
    yield _table(_ATTEMPT_COLUMNS, _attempt_rows(graph.attempts))


def _title(graph: CompileReport) -> str:
    dtype = graph.dtype or "no tensors"
    traits = [counted(graph.nodes, "op"), printable(f"{dtype} on {graph.device}")]
    if graph.training:
        traits.append("training")
    if graph.dynamic:
        traits.append("dynamic shapes")
    result = "raised an error"
    if graph.chosen:
        result = f"runs on {printable(_engines(graph))}, {_calls(graph.runtime.read())}"
    name = printable(f"graph {graph.label}  {graph.model}")
    notes: dict[str, object] = {
        "in the background: ": graph.runtime.under_way,
        "compiled late, ": graph.late,
        "compiled again, Dynamo's reason: ": graph.recompiled,
        "": graph.lock and graph.lock.unlocked,
    }
    lines = [f"{name}  ({', '.join(traits)})", result]
    lines += [printable(f"{before}{note}") for before, note in notes.items() if note]
    return "\n  ".join(lines)


def _engines(graph: CompileReport) -> str:
    """Return a text such as ``"onnxrt"`` or ``"onnxrt (sizes up to 16), inductor (from 17)"``."""
    further = graph.ranges[1:]
    if not further:
        return graph.chosen
    spans = [f"sizes up to {further[0].least - 1:,}", *(f"from {r.least:,}" for r in further)]
    pairs = zip(graph.ranges, spans, strict=True)
    return ", ".join(f"{each.chosen} ({span})" for each, span in pairs)


def _calls(counters: Counters) -> str:
    """Return a text such as ``"40 calls, 1 answered by eager"``."""
    parts = [counted(counters.calls, "call")]
    if counters.fallbacks:
        parts.append(f"{counters.fallbacks:,} answered by eager")
    if counters.verified:
        parts.append(f"{counters.verified:,} compared with eager")
    return ", ".join(parts)


def counted(number: int, noun: str) -> str:
    """Return a text such as ``"1 graph"``, ``"1,200 graphs"`` or ``"2 processes"``."""
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def cell(value: float | None, form: str) -> str:
    """Return a number in the form of a format specification; empty for ``None``."""
    return "" if value is None else format(value, form)


def ratio_text(ratio: float, rounds: int, quartiles: Sequence[float] = ()) -> str:
    """Return ``"1.14 (0.92-1.20)"``; ``"about 1.1"`` if there were too few rounds for more."""
    if rounds < ENOUGH_ROUNDS:
        return f"about {float(f'{ratio:.2g}'):g}"
    spread = "-".join(f"{each:.2f}" for each in quartiles)
    return f"{ratio:.2f} ({spread})" if spread else f"{ratio:.2f}"


def _facts(engine: dict[str, Any]) -> str:
    """Return a text such as ``"onnxruntime 1.31.1, providers CPUExecutionProvider"``."""
    return ", ".join(_named_fact(name, value) for name, value in engine.items())


def _named_fact(name: str, value: Any) -> str:
    if name == "timing" and isinstance(value, dict) and {"ms", "eager_ms"} <= value.keys():
        return _timing(value)
    return f"{name} {_fact(value)}"


def _timing(timing: dict[str, Any]) -> str:
    """Return ``"0.21 ms a call, 4.20 (4.10-4.30) times as fast as eager in 9 rounds"`` or alike."""
    text = f"{timing['ms']:.3g} ms a call"
    if "size" in timing:
        text += f" of size {timing['size']:,}"
    if "mib" in timing:
        text += f" and {_fact(timing['mib'])} MiB"
    if "over_eager" in timing:
        quartiles = timing["over_eager_p25"], timing["over_eager_p75"]
        ratio = ratio_text(timing["over_eager"], timing["rounds"], quartiles)
        text += f", {ratio} times as fast as eager in {timing['rounds']} rounds"
    else:
        text += f", eager {timing['eager_ms']:.3g} ms"
    if "measured" in timing:
        text += f", as measured on {str(timing['measured'])[:10]}"
    return text + UNDER_LOAD if timing.get("under_load") else text


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_fact, value))
    if isinstance(value, dict):
        return " ".join(f"{name} {_fact(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.2g}"
    return str(value)


def _html_table(columns: _Columns, rows: Iterable[tuple[str, ...]]) -> str:
    names, numbers, last = columns
    head = _html_row("th", (*names, *numbers, last))
    body = "".join(_html_row("td", row) for row in rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _html_row(tag: str, cells: Iterable[str]) -> str:
    inner = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"


_Columns = tuple[tuple[str, ...], tuple[str, ...], str]
"""The headings of text columns, of number columns, and of the last column, whose text wraps."""
_PASS_COLUMNS: _Columns = ("pass", "stage"), ("matches", "nodes", "seconds"), "error"
_ATTEMPT_COLUMNS: _Columns = (
    ("backend", "status", "reason"),
    ("seconds", "covers"),
    "what it said",
)


def _pass_rows(passes: Iterable[PassRecord]) -> Iterator[tuple[str, ...]]:
    for each in passes:
        nodes = f"{each.nodes_before} -> {each.nodes_after}"
        numbers = (cell(each.matches, "d"), nodes, f"{each.seconds:.3f}")
        yield each.name, each.stage, *numbers, first_line(each.error)


def _attempt_rows(attempts: Sequence[Attempt]) -> Iterator[tuple[str, ...]]:
    candidates = Counter(each.backend for each in attempts)
    for each in attempts:
        name = each.backend
        if candidates[name] > 1:  # the options show which is which
            name = spelled(name, each.options)
        message = first_line(each.message) or each.error_type or _facts(each.engine)
        numbers = (f"{each.seconds:.3f}", cell(each.coverage, ".0%"))
        yield name, each.status, each.reason or "", *numbers, message


def _table(columns: _Columns, rows: Iterable[tuple[str, ...]]) -> str:
    from rich import box
    from rich.table import Table

    names, numbers, last = columns
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(last, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return _text(table)


def _text(table: Table) -> str:
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, color_system=None, highlight=False, markup=False)
    console.print(table)
    lines = (printable(line).rstrip() for line in text.getvalue().splitlines())
    return "\n".join(f"  {line}" for line in lines if line)
