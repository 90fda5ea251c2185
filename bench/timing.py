"""How every bench measures: variants side by side, round after round, in one process.

A shared machine drifts by more than the differences that matter. So each round times every variant
once, the order rotates from round to round, and two variants are compared by the ratios of their
times within the same round.

The engines' thread pools go on spinning for a while after a call, and on two cores slow down who
runs next, by a factor of 1.3 to 2. So each variant first makes calls that do not count until that
is over, and the times are those of a process that runs one engine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

Clock = Callable[[Callable[[], object], int], float]
"""Calls something so many times in a row; the milliseconds that one call took."""

SETTLE = 0.1
"""Seconds that outlast any pool's spinning: on an AMD EPYC (Zen 5), ONNX Runtime's own default
(1.31) spun for 33 to 46 ms after a call, torch's OpenMP for 7 to 11, OpenVINO (2026.4) for 1."""

MEASURED_PACKAGES = ("torch", "onnxruntime", "onnx", "onnxscript", "transformers")


@dataclass(frozen=True, slots=True)
class Series:
    """The times of one variant, milliseconds a call, one for each round in their order."""

    milliseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle time, in milliseconds."""
        return statistics.median(self.milliseconds)

    @property
    def minimum(self) -> float:
        """The shortest time, in milliseconds: the least disturbed call."""
        return min(self.milliseconds)

    @property
    def p25(self) -> float:
        """The first quartile, in milliseconds."""
        return quartiles(self.milliseconds)[0]

    @property
    def p75(self) -> float:
        """The third quartile, in milliseconds."""
        return quartiles(self.milliseconds)[2]

    def to_dict(self) -> dict[str, float | int]:
        """The summary in milliseconds, and the number of rounds behind it."""
        return {
            "median_ms": self.median,
            "minimum_ms": self.minimum,
            "p25_ms": self.p25,
            "p75_ms": self.p75,
            "rounds": len(self.milliseconds),
        }


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of the ratios of two series, round by round, and its quartiles; no unit."""

    median: float
    p25: float
    p75: float

    def to_dict(self) -> dict[str, float]:
        """The three numbers by name."""
        return {"median": self.median, "p25": self.p25, "p75": self.p75}


class VariantError(Exception):
    """A variant raised while it was measured; ``__cause__`` is what it raised."""

    def __init__(self, variant: str) -> None:
        super().__init__(f"variant {variant!r} raised while it was measured")
        self.variant = variant


def wall_clock(call: Callable[[], object], calls: int) -> float:
    """Milliseconds that one call takes by the clock of the CPU: the mean of ``calls`` in a row."""
    repeats = range(calls)
    start = time.perf_counter_ns()
    for _ in repeats:
        call()
    return (time.perf_counter_ns() - start) / calls / 1e6


def measure(
    variants: Mapping[str, Callable[[], object]],
    rounds: int = 15,
    warmup: int = 3,
    calls: int = 1,
    settle: float = SETTLE,
    clock: Clock = wall_clock,
) -> dict[str, Series]:
    """Time every variant once a round, starting each round with the next variant.

    Args:
        variants: What to call, by name.
        rounds: Rounds that count, at least 1.
        warmup: Rounds before them that do not.
        calls: Calls that share one reading of the clock, which itself takes about 0.1 us: for
            calls of microseconds, take a thousand. The times stay those of one call.
        settle: Seconds of calls of a variant, two at least, just before its timed ones: the one
            before it comes to rest meanwhile. 0 makes none.
        clock: What times calls; by default the CPU's clock.

    Returns:
        One :class:`Series` for each variant, in the order of ``variants``.

    Raises:
        ValueError: ``rounds`` or ``calls`` is less than 1.
        VariantError: a variant raised; nothing more is measured.
    """
    if rounds < 1 or calls < 1:
        raise ValueError(f"rounds and calls start at 1, not {rounds} and {calls}")
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    with collector_off():
        for turn in range(-warmup, rounds):
            for name in rotated(names, turn):
                elapsed = timed(name, variants[name], calls, settle, clock)
                if turn >= 0:
                    times[name].append(elapsed)
    return {name: Series(tuple(taken)) for name, taken in times.items()}


def timed(
    name: str, call: Callable[[], object], calls: int, settle: float, clock: Clock = wall_clock
) -> float:
    """Milliseconds that one call takes by ``clock``, after ``settle`` seconds of others."""
    try:
        until = time.perf_counter() + settle
        for _ in range(2 if settle else 0):
            clock(call, 1)
        while time.perf_counter() < until:
            clock(call, 1)
        return clock(call, calls)
    except Exception as error:
        raise VariantError(name) from error


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """``names`` from the one whose turn it is, then round to the one before it."""
    first = turn % max(len(names), 1)
    return [*names[first:], *names[:first]]


def paired_ratio(a: Series, b: Series) -> Ratio:
    """How many times as long as ``b`` the variant ``a`` takes, from the rounds both were in.

    Raises:
        ValueError: the series have different numbers of rounds.
    """
    ratios = [x / y for x, y in zip(a.milliseconds, b.milliseconds, strict=True)]
    p25, median, p75 = quartiles(ratios)
    return Ratio(median, p25, p75)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, interpolated; of one value, three times it."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    p25, median, p75 = statistics.quantiles(values, n=4, method="inclusive")
    return p25, median, p75


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collect garbage once, then keep the cyclic collector out of the times."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def machine(more: Sequence[str] = ()) -> dict[str, object]:
    """What the numbers depend on; call it before measuring. Holds no host, user or path names.

    Args:
        more: Packages whose versions matter as well.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": cores(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "load_average_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in (*MEASURED_PACKAGES, *more)},
    }


KINDS = ("cpu family", "model")
"""What tells one processor of a name from another: Zen 4 from Zen 5, say."""


def cpu_model() -> str:
    """The processor's name as it says itself, and its family and model, which a virtual one hides.

    What Python knows of it away from Linux, and where it says nothing.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    pairs = (line.partition(":") for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    name = facts.get("model name") or platform.processor() or "unknown"
    numbers = [f"{each.removeprefix('cpu ')} {facts[each]}" for each in KINDS if each in facts]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def cores() -> int | None:
    """How many cores this process may run on; ``None`` where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def installed_version(package: str) -> str | None:
    """The installed version of ``package``, without importing it; ``None`` if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write ``record`` as indented JSON, making the folder of ``path`` if there is none.

    Raises:
        ValueError: a number in ``record`` is NaN or infinite, which JSON cannot say.
    """
    text = json.dumps(record, indent=2, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
