"""The chart of the README is drawn from the figures that are committed."""

from __future__ import annotations

import json
import statistics
from typing import Any

from common import ROOT


def test_committed_chart_is_what_the_figures_say(room: Any) -> None:
    """If this fails: ``python bench/chart.py``."""
    chart = room("chart")
    record = json.loads(chart.FIGURES.read_text())
    for name, colours in (("light", chart.LIGHT), ("dark", chart.DARK)):
        drawn = (ROOT / "docs" / "images" / f"speed-{name}.svg").read_text()
        assert drawn == chart.svg(record, colours)


def test_readme_says_the_chart_s_geometric_means(room: Any) -> None:
    """Over eager and over torch.compile, and the least and the largest bar of each."""
    chart = room("chart")
    speeds = chart.speeds(json.loads(chart.FIGURES.read_text())).values()
    readme = (ROOT / "README.md").read_text()
    over_eager = statistics.geometric_mean([ours for _, ours in speeds])
    over_inductor = statistics.geometric_mean([ours / theirs for theirs, ours in speeds])
    said = f"{over_eager:.2f} times as fast as eager and {over_inductor:.2f} times as fast as"
    assert said in readme
    theirs, ours = ([pair[side] for pair in speeds] for side in (0, 1))
    assert f"runs {min(ours):.2f} to {max(ours):.2f} times as fast as eager" in readme
    assert f"torch.compile {min(theirs):.2f} to {max(theirs):.2f} times" in readme
