"""How the benches' plots look: colours and marks that the colour-blind can tell, labelled axes."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import LogFormatter

# Okabe and Ito's palette (2008), for all common kinds of colour vision.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
MARKS = "osD^vPX*<>"
DPI = 110


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, what stands below it, and the figures in it."""

    name: str
    title: str
    caption: str
    image: bytes
    headings: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


Points = Mapping[str, Mapping[str, float]]
"""By place along the axis: ``median``, and where they are known ``p25`` and ``p75``."""


def dots(
    series: Mapping[str, Points], title: str, axis: str, under: str, line: float | None = None
) -> bytes:
    """A row for each place, a mark for each series in it, on a logarithmic axis; a PNG.

    Args:
        series: Points by name.
        title: Stands above.
        axis: What the axis shows, with its unit.
        under: The caption.
        line: A value to be marked.
    """
    places = list(dict.fromkeys(place for points in series.values() for place in points))
    figure, axes = pyplot.subplots(figsize=(9, 1.8 + 0.5 * len(places)), layout="constrained")
    for index, (name, points) in enumerate(series.items()):
        shift = (index - (len(series) - 1) / 2) * 0.7 / max(len(series), 1)
        at = [places.index(place) + shift for place in points]
        draw(axes, at, list(points.values()), name, index)
    axes.set_yticks(range(len(places)), places)
    axes.invert_yaxis()
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    if line is not None:
        axes.axvline(line, color="#888888", linewidth=1, zorder=0)
    axes.set_xlabel(axis)
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return png(figure, under)


def plain_numbers(axis: Any) -> None:
    """No powers of ten, and few enough of them to be read."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axis.set_tick_params(which="minor", labelsize="x-small")


def draw(
    axes: Any, at: Sequence[float], points: Sequence[Mapping[str, float]], name: str, index: int
) -> None:
    """The marks of one series, with bars where quartiles are known."""
    middle = [each["median"] for each in points]
    low = [each["median"] - each.get("p25", each["median"]) for each in points]
    high = [each.get("p75", each["median"]) - each["median"] for each in points]
    axes.errorbar(
        middle,
        at,
        xerr=[[max(each, 0.0) for each in low], [max(each, 0.0) for each in high]],
        fmt=MARKS[index % len(MARKS)],
        color=COLOURS[index % len(COLOURS)],
        markeredgecolor="#000000",
        markeredgewidth=0.5,
        label=name,
    )


def curves(
    panels: Mapping[str, Mapping[str, Points]], title: str, axis: str, under: str, *, ratio: bool
) -> bytes:
    """A panel for each sweep: lines over its sizes, with quartiles; a PNG.

    Args:
        panels: Series by sweep, points by size.
        title: Stands above.
        axis: What the vertical axes show, with their unit.
        under: The caption.
        ratio: Whether they show ratios: 1 is marked, and the axis is not logarithmic.
    """
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(3.2 * len(panels) + 1, 3.4), layout="constrained", squeeze=False
    )
    for axes, (sweep, series) in zip(all_axes[0], panels.items(), strict=True):
        for index, (name, points) in enumerate(series.items()):
            sizes, values = [int(size) for size in points], list(points.values())
            colour = COLOURS[-3 + index]
            mark = MARKS[index % len(MARKS)]
            axes.plot(sizes, [v["median"] for v in values], marker=mark, color=colour, label=name)
            low, high = ([v.get(p, v["median"]) for v in values] for p in ("p25", "p75"))
            axes.fill_between(sizes, low, high, color=colour, alpha=0.2)
        axes.set_xscale("log")
        axes.set_xticks(sizes, map(str, sizes))
        axes.set_xticks((), minor=True)
        axes.set_xlabel(sweep)
        if ratio:
            axes.axhline(1.0, color="#888888", linewidth=1, zorder=0)
        else:
            axes.set_yscale("log")
            plain_numbers(axes.yaxis)
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel(axis)
    all_axes[0][-1].legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    return png(figure, under)


def png(figure: Any, under: str) -> bytes:
    """The figure, with its caption, as a file's bytes; it is closed."""
    figure.supxlabel(textwrap.fill(under, 130), fontsize="x-small", color="#555555")
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=DPI, metadata={"Software": None})
    pyplot.close(figure)
    return made.getvalue()


def named(kind: str, title: str) -> str:
    """A file's name: ``speed_call_fp32`` of "Speed over eager: a call, fp32"."""
    words = re.findall(r"[a-z0-9]+", title.partition(":")[2].lower())
    return "_".join((kind, *(word for word in words if word not in ("a", "of"))))
