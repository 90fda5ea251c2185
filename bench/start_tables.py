"""The Markdown tables of ``warm.py``, ``choosing.py``, ``guards.py`` and ``generation.py``."""

from __future__ import annotations

from markdown_table import Record, described, ratio, table


def warm(record: Record) -> str:
    """Seconds to the first result of a process, and what they are to Inductor's."""
    models: Record = record["models"]
    starts = dict.fromkeys(name for each in models.values() for name in each["seconds"])
    pairs = dict.fromkeys(pair for each in models.values() for pair in each["first"])
    seconds = [
        (model, *(f"{found['seconds'][name]['median']:.2f}" for name in starts))
        for model, found in models.items()
    ]
    kinds = {"first": "to the first result", "engine": "without Dynamo's share"}
    ratios = [
        (model, told, *(ratio(cell) if (cell := found[kind].get(pair)) else "" for pair in pairs))
        for model, found in models.items()
        for kind, told in kinds.items()
    ]
    tables = (
        table(("median s to the first result", *starts), seconds, text=1),
        table(("ratio (quartiles)", "seconds", *pairs), ratios),
    )
    return "\n\n".join((described(record), *tables))


def choosing(record: Record) -> str:
    """How many picks were wrong, and the time of choosing as a share of the builds'."""
    headings = ("model", "ms a call", "picks", "wrong", "of")
    headings += ("builds, s", "choosing, s", "its share", "at most")
    rows = [
        (
            model,
            ", ".join(f"{name} {ms:.2f}" for name, ms in found["milliseconds"].items()),
            ", ".join(f"{name} {count}" for name, count in found["picks"].items()),
            *(str(found["wrong"]), str(found["selections"])),
            *(f"{found['build_seconds']:.1f}", f"{found['seconds']['median']:.2f}"),
            *(f"{found['share_of_build'][part]:.0%}" for part in ("median", "most")),
        )
        for model, found in record["models"].items()
    ]
    busy = "One core was kept busy." if record["load"] else "Nothing was run beside it."
    return f"{described(record)} {busy}\n\n{table(headings, rows, text=3)}"


def guards(record: Record) -> str:
    """What calls take with one layer less and less, over the engine by itself, and the parts."""
    rows = [
        (model, name, f"{found['milliseconds'][name]['median_ms']:.2f}", ratio(each))
        for model, found in record["models"].items()
        for name, each in found["ratios"].items()
    ]
    headings = ("model", "variant", "median ms", f"/ {record['native']}")
    names = dict.fromkeys(name for found in record["models"].values() for name in found["parts"])
    parts = [
        (model, *(f"{found['parts'][name]['median_ms'] * 1e3:,.0f}" for name in names))
        for model, found in record["models"].items()
    ]
    tables = [described(record), table(headings, rows)]
    tables += [table(("us a call", *names), parts, text=1)] if names else []
    return "\n\n".join(tables)


def generation(record: Record) -> str:
    """What a step takes by cache and engine, and eager's and Inductor's time over it."""
    headings = ("cache", "places", "engine", "median ms", "eager / it", "inductor / it")
    rows = []
    for found in record["results"]:
        for name, each in found["milliseconds"].items():
            over = found["ratios"].get(name, {})
            cells = (ratio(over[base]) if base in over else "" for base in ("eager", "inductor"))
            where = found["kind"], f"{found['places']:,}", name
            rows.append((*where, f"{each['median_ms']:.1f}", *cells))
    return f"{described(record)}\n\n{table(headings, rows, text=3)}"
