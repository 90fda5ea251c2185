"""What rows of many models come to: regret, and geometric means over the models with spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from timing import Series, paired_ratio, quartiles
from variants import EAGER, FASTEST, INDUCTOR, VARIANTS

Times = Mapping[str, Series]


def regret(times: Times, variant: str = FASTEST) -> dict[str, Any] | None:
    """How many times as long as the best single engine a choice takes, in the same rounds.

    The best is the one with the least median of those rounds. To take the least of several noisy
    medians flatters it, so the regret is rather too large.

    Args:
        times: Of the variants of one model in one precision, by name.
        variant: The choice.
    """
    singles = {n: series for n, series in times.items() if VARIANTS[n].single}
    if variant not in times or not singles:
        return None
    best = min(singles, key=lambda name: singles[name].median)
    return {"best": best, **paired_ratio(times[variant], singles[best]).to_dict()}


def over_fastest(times: Times, variant: str = FASTEST) -> dict[str, dict[str, float]]:
    """How many times as long as composer's choice eager and Inductor take, in the same rounds."""
    if variant not in times:
        return {}
    others = [name for name in (EAGER, INDUCTOR) if name in times]
    return {name: paired_ratio(times[name], times[variant]).to_dict() for name in others}


def geometric(ratios: Iterable[Mapping[str, float]]) -> dict[str, float] | None:
    """The geometric mean of the models' medians, of their quartiles, and the models' spread.

    ``least`` and ``most`` are the models at the ends, ``spread_p25`` and ``spread_p75`` the
    quartiles among the models.
    """
    found = list(ratios)
    if not found:
        return None
    medians = [each["median"] for each in found]
    low, _, high = quartiles(medians)
    means = {part: mean([each[part] for each in found]) for part in ("median", "p25", "p75")}
    ends = {"least": min(medians), "most": max(medians), "spread_p25": low, "spread_p75": high}
    return {**means, **ends, "models": len(found)}


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def summary(comparisons: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over all models: eager's and Inductor's time over that of composer's choice, and regret.

    Args:
        comparisons: By model, ``regret`` and ``over_fastest`` as above.
    """
    rows = list(comparisons.values())
    ratios = {
        name: geometric(row["over_fastest"][name] for row in rows if name in row["over_fastest"])
        for name in (EAGER, INDUCTOR)
    }
    regrets = [row["regret"] for row in rows if row["regret"]]
    return {"over_fastest": ratios, "regret": geometric(regrets)}
