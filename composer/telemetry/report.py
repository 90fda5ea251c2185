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

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 110

_SHORT = 10
"""The largest number of graphs in a short report, which ends with a hint."""

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

    def __str__(self) -> str:
        """Return a text with every graph, the engine that serves it, and its attempts."""
        tables = (line for graph in self.graphs for line in ("", *tables_of(graph)))
        without = (f"\nno graph of {each}" for each in self.without_graph or ())
        hint = [f"\n{untried(self.untried, _COMPARES)}"] if self._is_short else []
        return "\n".join((headline(self.graphs), *tables, *without, *hint)).rstrip()

    @property
    def _is_short(self) -> bool:
        """True if there is a hint, and the report is short enough that a user sees it."""
        return bool(self.untried) and len(self.graphs) <= _SHORT

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the report as HTML tables, for notebooks."""
        without = (f"no graph of {each}" for each in self.without_graph or ())
        return html_of(headline(self.graphs), self.graphs, without)

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"graphs": [...], "without_graph": [...]}``, with records of schema version 1.

        The key ``without_graph`` is missing if its value is not known.
        """
        graphs = {"graphs": [graph.to_dict() for graph in self.graphs]}
        if self.without_graph is None:
            return graphs
        return graphs | {"without_graph": plain(self.without_graph)}

    def to_json(self, indent: int | None = None) -> str:
        """Return the result of :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)


def untried(engines: Iterable[str], compares: str) -> str:
    """Return the hint that names installed engines that were not tried, and how to compare them."""
    return f"installed and not tried: {', '.join(engines)}; {compares} compares them"


def headline(graphs: Sequence[CompileReport]) -> str:
    """Return a line with the number of graphs, the compile time, and the serving engines."""
    if not graphs:
        return "composer: nothing was compiled"
    chosen = Counter(graph.chosen or "nobody" for graph in graphs)
    engines = ", ".join(f"{printable(name)} {count}" for name, count in chosen.most_common())
    seconds = sum(graph.seconds for graph in graphs)
    return f"composer: {counted(len(graphs), 'graph')} in {seconds:.2f} s, served by: {engines}"


def tables_of(graph: CompileReport) -> Iterator[str]:
    """Yield the title of a graph, the table of its passes, and the table of its attempts."""
    yield _title(graph)
    if graph.passes:
        yield _table(_PASS_COLUMNS, _pass_rows(graph.passes))
    yield _table(_ATTEMPT_COLUMNS, _attempt_rows(graph.attempts))


def _title(graph: CompileReport) -> str:
    on = printable(f"{graph.dtype or 'no tensors'} on {graph.device}")
    traits = [counted(graph.nodes, "op"), on]
    traits += ["training"] * graph.training + ["dynamic shapes"] * graph.dynamic
    named = printable(f"graph {graph.label}  {graph.model}")
    by = f"runs on {printable(graph.chosen)}, {_calls(graph.runtime.read())}"
    return f"{named}  ({', '.join(traits)})\n  {by if graph.chosen else 'raised an error'}"


def _calls(counters: Counters) -> str:
    """Return a text such as ``"40 calls, 1 answered by eager"``."""
    said = [counted(counters.calls, "call")]
    said += [f"{counters.fallbacks:,} answered by eager"] * bool(counters.fallbacks)
    said += [f"{counters.verified:,} compared with eager"] * bool(counters.verified)
    return ", ".join(said)


def counted(number: int, noun: str) -> str:
    """Return a text such as ``"1 graph"`` or ``"2 graphs"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _facts(engine: dict[str, Any]) -> str:
    """Return a text such as ``"onnxruntime 1.31.1, providers CPUExecutionProvider"``."""
    return ", ".join(
        _timing(value) if name == "timing" else f"{name} {_fact(value)}"
        for name, value in engine.items()
    )


def _timing(value: Any) -> str:
    """Return ``"0.21 ms a call, 4.20 times as fast as eager (4.10-4.30 in 6 rounds)"`` or alike."""
    if not isinstance(value, dict) or not {"ms", "eager_ms"} <= value.keys():
        return f"timing {_fact(value)}"
    size = f" and {_fact(value['mib'])} MiB" if "mib" in value else ""
    then = f", as measured on {str(value['measured'])[:10]}" if "measured" in value else ""
    beside = f"eager {value['eager_ms']:.3g} ms"
    if "over_eager" in value:
        median, low, high = (value[f"over_eager{end}"] for end in ("", "_p25", "_p75"))
        spread = f"{low:.2f}-{high:.2f} in {value['rounds']} rounds"
        beside = f"{median:.2f} times as fast as eager ({spread})"
    return f"{value['ms']:.3g} ms a call{size}, {beside}{then}"


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_fact, value))
    if isinstance(value, dict):
        return " ".join(f"{name} {_fact(each)}" for name, each in value.items())
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def html_of(title: str, graphs: Iterable[CompileReport], notes: Iterable[str] = ()) -> str:
    """Return HTML for a notebook, which adds its own style for tables.

    Args:
        title: The text above the graphs.
        graphs: The graphs; each gets a line and its tables.
        notes: Texts below the graphs.
    """
    found = [f"<p><strong>{escape(title)}</strong></p>"]
    for graph in graphs:
        found.append(f"<p>{escape(_title(graph)).replace(chr(10), '<br>')}</p>")
        found += [_html_table(_PASS_COLUMNS, _pass_rows(graph.passes))] if graph.passes else []
        found.append(_html_table(_ATTEMPT_COLUMNS, _attempt_rows(graph.attempts)))
    return "\n".join((*found, *(f"<pre>{escape(note)}</pre>" for note in notes)))


def _html_table(columns: _Columns, rows: Iterable[tuple[str, ...]]) -> str:
    names, numbers, last = columns
    headings = "".join(f"<th>{each}</th>" for each in (*names, *numbers, last))
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>"


_Columns = tuple[tuple[str, ...], tuple[str, ...], str]
"""The headings of text columns, of number columns, and of the last column, whose text wraps."""
_PASS_COLUMNS: _Columns = ("pass", "stage"), ("matches", "nodes", "seconds"), "error"
_ATTEMPT_COLUMNS: _Columns = ("backend", "status", "reason"), ("seconds", "covers"), "what it said"


def _pass_rows(passes: Iterable[PassRecord]) -> Iterator[tuple[str, ...]]:
    for each in passes:
        matches = "" if each.matches is None else str(each.matches)
        nodes = f"{each.nodes_before} -> {each.nodes_after}"
        error = first_line(each.error)
        yield each.name, each.stage, matches, nodes, f"{each.seconds:.3f}", error


def _attempt_rows(attempts: Sequence[Attempt]) -> Iterator[tuple[str, ...]]:
    times = Counter(each.backend for each in attempts)
    for each in attempts:
        # If an engine has several candidates, their options show which is which.
        options = each.options if times[each.backend] > 1 else {}
        name = spelled(each.backend, options)
        covers = "" if each.coverage is None else f"{each.coverage:.0%}"
        seconds = f"{each.seconds:.3f}"
        said = first_line(each.message) or each.error_type or _facts(each.engine)
        yield name, each.status, each.reason or "", seconds, covers, said


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
