"""Draws what stands in ``bench/results``: a PNG for each plot, and ``index.html`` with all of them.

``python bench/plots.py`` needs matplotlib (the extra ``bench``); the page needs no network.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drawing import Figure, curves
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_table import Record, described
from model_plots import of_models

HERE = Path(__file__).parent
SIDES = {"plain": "engine alone", "composer": "through composer"}


def of_scaling(record: Record) -> Iterator[Figure]:
    """Compile, call and memory over the size of each sweep, and what composer adds."""
    under = f"{described(record)} Bands are quartiles of the rounds."
    sweeps = record["sweeps"]
    for part, unit, scale in (("compile", "ms of the first call", 1.0), ("call", "us a call", 1e3)):
        title = f"What a {part} takes by size"
        panels = {
            sweep: {name: timed(sizes, part, side, scale) for side, name in SIDES.items()}
            for sweep, sizes in sweeps.items()
        }
        image = curves(panels, title, unit, under, ratio=False)
        yield Figure(f"scaling_{part}", title, under, image)
        title = f"What composer adds to a {part} by size"
        ratios = {
            sweep: {"composer / alone": {size: row[part]["ratio"] for size, row in sizes.items()}}
            for sweep, sizes in sweeps.items()
        }
        image = curves(ratios, title, "composer / engine alone", under, ratio=True)
        yield Figure(f"scaling_{part}_ratio", title, under, image)
    title = "Python's own memory after a compile by size"
    kept = {
        sweep: {name: held(sizes, side) for side, name in SIDES.items()}
        for sweep, sizes in sweeps.items()
    }
    image = curves(kept, title, "KiB", under, ratio=False)
    yield Figure("scaling_memory", title, under, image)


def timed(sizes: Record, part: str, side: str, scale: float) -> dict[str, dict[str, float]]:
    """Median and quartiles by size."""
    names = ("median", "p25", "p75")
    return {
        size: {name: row[part][side][f"{name}_ms"] * scale for name in names}
        for size, row in sizes.items()
    }


def held(sizes: Record, side: str) -> dict[str, dict[str, float]]:
    """What Python holds, by size."""
    return {size: {"median": row["memory"][side]["kept_kib"]} for size, row in sizes.items()}


def figures(results: Path) -> Iterator[Figure]:
    """Every plot that there are figures for."""
    for name, kind in (("models", "call"), ("training", "step of training")):
        if record := recorded(results / f"{name}.json"):
            yield from of_models(record, kind)
    if record := recorded(results / "scaling.json"):
        yield from of_scaling(record)


def recorded(file: Path) -> dict[str, Any]:
    """What a file holds; nothing where there is none."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def page(drawn: list[Figure]) -> str:
    """All plots within one file."""
    loader = FileSystemLoader(HERE)
    room = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    shown = [
        {
            "title": each.title,
            "caption": each.caption,
            "image": base64.b64encode(each.image).decode(),
            "headings": each.headings,
            "rows": each.rows,
        }
        for each in drawn
    ]
    return room.get_template("page.html.j2").render(figures=shown)


def draw(results: Path) -> list[Path]:
    """Write the plots and the page beside the figures; what was written."""
    drawn = list(figures(results))
    written = []
    for each in drawn:
        written.append(results / f"{each.name}.png")
        written[-1].write_bytes(each.image)
    written.append(results / "index.html")
    written[-1].write_text(page(drawn), encoding="utf-8")
    return written


def main() -> int:
    """Draw, and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the folder")
    for file in draw(parser.parse_args().results):
        print(file.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
