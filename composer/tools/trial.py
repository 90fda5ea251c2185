"""Runs the program of a folder in a child process, and says which faults it shows.

The folder is one of :mod:`composer.chain.repro`. Its ``run.py`` names the engine, and calls a
function of ``check.py`` with it. In the child, another function stands in for that one.
"""

from __future__ import annotations

import functools
import importlib
import json
import runpy
import statistics
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from composer import session
from composer.errors import SandboxRefusal, causes, error_line
from composer.graphs import check
from composer.graphs.comparison import Mismatch, Values, errors_of
from composer.records import Status
from composer.system.hardware import Waits
from composer.system.subprocesses import Limits, ask

STRUCTURE = "wrong shape or dtype"
NON_FINITE = "NaN or infinity"
NUMBERS = "wrong numbers"
SLOWER = "slower than eager"
HANG = "hang"
CRASH = "crash"
"""The kinds of faults. Another is ``raises`` and the class of an exception."""

# The first compile of a process imports for seconds. The children find it done.
importlib.import_module("functorch.compile")

_KINDS = {
    Mismatch.STRUCTURE: STRUCTURE,
    Mismatch.NON_FINITE: NON_FINITE,
    Mismatch.NUMBERS: NUMBERS,
}
_ENDS = {Status.TIMED_OUT: HANG, Status.CRASHED: CRASH}
_ROUNDS = 9
_ROUND_SECONDS = 0.01
_MOST_CALLS = 50

_Engine = Callable[[torch.nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Trial:
    """What a folder showed.

    Attributes:
        faults: What was seen of each fault, by its kind, the gravest first.
        unknown: Why nothing can be said of the engine; else empty.
        errors: The largest error of a value of the engine, and of eager mode: the difference from
            float64, as a share of the root mean square of the value. Empty if unknown.
        ratio: Eager's time over the engine's: the quartiles of the rounds. Empty if not asked for.
        beside_load: True if other programs took the cores meanwhile, so that times say little.
        coverage: The share of the graph's work that the engine took; 1 if composer did not run it.
    """

    faults: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""
    errors: Sequence[float] = ()
    ratio: Sequence[float] = ()
    beside_load: bool = False
    coverage: float = 1.0


def tried(
    folder: Path, seconds: float, *, factor: float | None = None, timed: bool = False
) -> Trial:
    """Run the program of a folder in a child process.

    Args:
        folder: The folder.
        seconds: The time limit of the engine.
        factor: The engine is too slow if it takes as many times as long as eager mode.
        timed: True to measure how long it takes also without ``factor``.

    Raises:
        Refusal: no child process can be started here.
    """
    request = {"folder": str(folder), "factor": factor, "timed": timed}
    try:
        payload, limits = json.dumps(request).encode(), Limits(timeout=seconds)
        of_round = Limits(timeout=2 * seconds)  # it has a call of eager as well
        found = ask(f"{__name__}:judged", payload, limits, heard=lambda *_: of_round)
        return Trial(**found)
    except SandboxRefusal as refusal:
        kind = _ENDS.get(refusal.status)
        if kind is None or refusal.by_others:
            return Trial(unknown=str(refusal))
        return Trial({kind: str(refusal)})


def judged(payload: bytes, ready: Callable[..., None]) -> dict[str, Any]:
    """Run ``run.py`` of a folder in this process; return the fields of a :class:`Trial`."""
    sys.dont_write_bytecode = True  # such files name folders of the user
    request = json.loads(payload)
    found: dict[str, Any] = {}

    def main(
        graph: Callable[[], torch.nn.Module],
        inputs: Callable[[], list[Any]],
        engine: _Engine,
        settings: check.Settings,
    ) -> None:
        try:
            expected = check.Expected.of(graph, inputs, settings)
        except Exception as error:  # noqa: BLE001  # said of the folder
            found["unknown"] = f"eager mode raises {error_line(error)}"
            return
        ready()
        module = graph()
        compiled: list[Callable[..., Any]] = []
        ratios: list[float] = []

        def once(module: torch.nn.Module) -> Callable[..., Any]:
            compiled.append(engine(module))
            return compiled[0]

        def rounds(module: torch.nn.Module) -> Callable[..., Any]:
            return functools.partial(_in_rounds, module, compiled[0], ratios, ready)

        try:
            got = check.values_of(module, inputs(), once, settings)
            waits = Waits.from_now()
            if request["timed"] or request["factor"] is not None:
                check.values_of(module, inputs(), rounds, settings)
        except BaseException as error:  # noqa: BLE001  # an engine may raise SystemExit as well
            (*_, first) = causes(error)
            found["faults"] = {f"raises {type(first).__name__}": error_line(error)}
            return
        found["faults"] = faults = _faults(got, expected)
        found["coverage"] = _coverage()
        if expected.exact and STRUCTURE not in faults:
            both = (got, expected.values)
            found["errors"] = [_largest_error(each, expected.exact) for each in both]
        if ratios:
            found["beside_load"] = waits.beside_load()
            found["ratio"] = quartiles = statistics.quantiles(ratios, n=4)
            if not faults and request["factor"] and quartiles[1] < 1 / request["factor"]:
                what = f"a call takes {1 / quartiles[1]:.3g} times as long as eager's"
                found["faults"] = {SLOWER: what}

    stand_in = types.ModuleType("check")
    vars(stand_in).update(Settings=check.Settings, main=main)
    sys.modules["check"] = stand_in
    sys.path.insert(0, request["folder"])
    runpy.run_path(f"{request['folder']}/run.py", run_name="__main__")
    return found


def _faults(got: Values, expected: check.Expected) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (mismatch, why) in expected.differences(got).items():
        both = "" if mismatch is Mismatch.STRUCTURE else _both(got[name], expected.values[name])
        found.setdefault(_KINDS[mismatch], f"{name} {why}{both}".strip())
    # Engines may draw other random numbers than eager mode does.
    kinds = [STRUCTURE] if expected.draws else _KINDS.values()
    return {kind: found[kind] for kind in kinds if kind in found}


def _largest_error(values: Values, exact: Values) -> float:
    """Return the largest error of a value; the exact ones have the same shapes."""
    errors = [errors_of(values[name], each).relative for name, each in exact.items()]
    return max(errors, default=0.0)


def _coverage() -> float:
    """Return the coverage of the graph that composer compiled last; 1 if it has not."""
    attempts = [each for report in session.reports()[-1:] for each in report.attempts]
    return next((each.coverage for each in reversed(attempts) if each.coverage is not None), 1.0)


def _both(got: Any, right: Any) -> str:
    """Return the two values where they differ most."""
    if not isinstance(right, torch.Tensor):
        return ""
    error = (got.to(torch.complex128) - right.to(torch.complex128)).abs()
    error[torch.isclose(got, right, rtol=0, atol=0, equal_nan=True)] = 0.0
    place = int(error.nan_to_num(nan=torch.inf).argmax())
    where = [int(each) for each in torch.unravel_index(torch.tensor(place), got.shape)]
    mine = got.flatten()[place].item()
    eagers = right.flatten()[place].item()
    return f"; element {where} is {mine!r}, eager's is {eagers!r}"


def _in_rounds(
    eager: Callable[..., Any],
    engine: Callable[..., Any],
    ratios: list[float],
    ready: Callable[..., None],
    *args: Any,
) -> Any:
    """Measure in rounds eager's time over the engine's; return what eager returns."""
    ready("round")
    _seconds(eager, args, 1)
    calls = min(_MOST_CALLS, 1 + int(_ROUND_SECONDS / _seconds(engine, args, 1)))
    for _ in range(_ROUNDS):
        ready("round")
        eagers = _seconds(eager, args, calls)
        ratios.append(eagers / _seconds(engine, args, calls))
    return eager(*args)


def _seconds(function: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
    """Return how long some calls take."""
    since = time.perf_counter()
    for _ in range(calls):
        _step(function, args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - since


def _step(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Call a function, and run the backward if there is one."""
    returned = function(*args)
    if isinstance(returned, torch.Tensor):
        returned = [returned]
    roots = [each for each in returned if isinstance(each, torch.Tensor) and each.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(each) for each in roots])
