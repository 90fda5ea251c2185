"""What rows of many models come to: regret, and geometric means over the models with spread."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from timing import Series, paired_ratio, quartiles
from variants import EAGER, FASTEST, INDUCTOR, VARIANTS, WITHOUT_OPENVINO

Times = Mapping[str, Series]


REFERENCES = (EAGER, INDUCTOR, *(f"{name} fp32" for name in (EAGER, INDUCTOR)))
"""What the choice is held against: in its own precision, and where that is lower in float32."""


def compared(times: Times, accurate: Collection[str]) -> dict[str, Any]:
    """Regret, and what composer's choice is over eager and Inductor; also without OpenVINO.

    Args:
        times: Of the variants of one model in one precision, by name; of another precision's
            with that behind it.
        accurate: The variants whose numbers hold what the choice's have to.
    """
    return {
        "regret": regret({n: each for n, each in times.items() if n in {*accurate, FASTEST}}),
        "over_fastest": over(times, FASTEST),
        "without_openvino": over(times, WITHOUT_OPENVINO),
    }


def regret(times: Times) -> dict[str, Any] | None:
    """How many times as long as the best single engine the choice takes, in the same rounds.

    The best is the one with the least median of those rounds. To take the least of several noisy
    medians flatters it, so the regret is rather too large.
    """
    singles = {n: each for n, each in times.items() if n in VARIANTS and VARIANTS[n].single}
    if FASTEST not in times or not singles:
        return None
    best = min(singles, key=lambda name: singles[name].median)
    return {"best": best, **paired_ratio(times[FASTEST], singles[best]).to_dict()}


def over(times: Times, choice: str) -> dict[str, dict[str, float]]:
    """How many times as long as a choice eager and Inductor take, in the same rounds."""
    if choice not in times:
        return {}
    others = [name for name in REFERENCES if name in times]
    return {name: paired_ratio(times[name], times[choice]).to_dict() for name in others}


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
    """The geometric means over all models.

    Args:
        comparisons: By model, what :func:`compared` gives.
    """
    rows = list(comparisons.values())
    means = {
        part: {
            name: geometric(row[part][name] for row in rows if name in row[part])
            for name in REFERENCES
        }
        for part in ("over_fastest", "without_openvino")
    }
    return {**means, "regret": geometric(row["regret"] for row in rows if row["regret"])}
