"""Runs the program of a folder in a child process, and says which faults it shows.

The folder is one of :mod:`composer.chain.repro`. Its ``run.py`` names the engine, and calls a
function of ``check.py`` with it. In the child, another function stands in for that one.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from composer.errors import SandboxRefusal, causes, error_line
from composer.graphs import check
from composer.records import Status
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

_KINDS = (STRUCTURE, NON_FINITE, NUMBERS)
_ENDS = {Status.TIMED_OUT: HANG, Status.CRASHED: CRASH}
_CALLS = 7

_Engine = Callable[[torch.nn.Module], Callable[..., Any]]


def faults_of(folder: Path, seconds: float, factor: float | None) -> Mapping[str, str]:
    """Return the faults that a folder shows: what was seen, by the kind, the gravest first.

    Args:
        folder: The folder.
        seconds: The time limit of the engine.
        factor: The engine is too slow if it takes as many times as long as eager mode.

    Raises:
        Refusal: no child process can be started here.
    """
    payload = json.dumps({"folder": str(folder), "factor": factor}).encode()
    try:
        found: Mapping[str, str] = ask(f"{__name__}:judged", payload, Limits(timeout=seconds))
        return found
    except SandboxRefusal as refusal:
        kind = _ENDS.get(refusal.status)
        return {} if kind is None or refusal.by_others else {kind: str(refusal)}


def judged(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """Run ``run.py`` of a folder in this process; return the faults that it shows."""
    sys.dont_write_bytecode = True  # such files name folders of the user
    request = json.loads(payload)
    found: dict[str, Any] = {}

    def main(
        graph: Callable[[], torch.nn.Module],
        inputs: Callable[[], list[Any]],
        engine: _Engine,
        settings: check.Settings,
    ) -> None:
        def run(by: _Engine) -> dict[str, Any]:
            return check.values_of(graph(), inputs(), by, settings)

        expected = run(_eager)
        exact = check.exact_values(graph(), inputs(), settings)
        ready()
        try:
            got = run(engine)
        except BaseException as error:  # noqa: BLE001  # an engine may raise SystemExit as well
            (*_, first) = causes(error)
            found[f"raises {type(first).__name__}"] = error_line(error)
            return
        found.update(_differences(got, expected, exact, settings))
        if not found and request["factor"] is not None:
            found.update(_slowness(run, engine, request["factor"]))

    stand_in = types.ModuleType("check")
    vars(stand_in).update(Settings=check.Settings, main=main)
    sys.modules["check"] = stand_in
    sys.path.insert(0, request["folder"])
    runpy.run_path(f"{request['folder']}/run.py", run_name="__main__")
    return found


def _eager(module: torch.nn.Module) -> Callable[..., Any]:
    return module


def _differences(
    got: Mapping[str, Any],
    expected: Mapping[str, Any],
    exact: Mapping[str, Any],
    settings: check.Settings,
) -> dict[str, str]:
    if got.keys() != expected.keys():
        return {STRUCTURE: f"{len(got)} values, eager has {len(expected)}"}
    found: dict[str, str] = {}
    for name, right in expected.items():
        why = check.difference(got[name], right, exact.get(name), settings)
        if why:
            found.setdefault(_kind(got[name], right), f"{name} {why}{_both(got[name], right)}")
    return {kind: found[kind] for kind in _KINDS if kind in found}


def _kind(got: Any, right: Any) -> str:
    if not _are_alike(got, right):
        return STRUCTURE
    return NUMBERS if torch.equal(got.isfinite(), right.isfinite()) else NON_FINITE


def _are_alike(got: Any, right: Any) -> bool:
    """Return True if two values are tensors that can be compared element by element."""
    if not isinstance(got, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    return (got.shape, got.dtype, got.device) == (right.shape, right.dtype, right.device)


def _both(got: Any, right: Any) -> str:
    """Return the two values where they differ most."""
    if not _are_alike(got, right):
        return ""
    error = (got.to(torch.complex128) - right.to(torch.complex128)).abs()
    error[torch.isclose(got, right, rtol=0, atol=0, equal_nan=True)] = 0.0
    place = int(error.nan_to_num(nan=torch.inf).argmax())
    where = [int(each) for each in torch.unravel_index(torch.tensor(place), got.shape)]
    mine = got.flatten()[place].item()
    eagers = right.flatten()[place].item()
    return f"; element {where} is {mine!r}, eager's is {eagers!r}"


def _slowness(run: Callable[[_Engine], object], engine: _Engine, factor: float) -> dict[str, str]:
    """Return that an engine is slower than eager mode by a factor, if it is."""
    eagers, mine = _seconds(run, _eager), _seconds(run, engine)
    if mine <= factor * eagers:
        return {}
    return {SLOWER: f"a call takes {mine * 1e3:.3g} ms, eager's {eagers * 1e3:.3g} ms"}


def _seconds(run: Callable[[_Engine], object], engine: _Engine) -> float:
    """Return how long a call takes, the shortest of some calls after the first."""
    times = []

    def timed(module: torch.nn.Module) -> Callable[..., Any]:
        function = engine(module)

        def calls(*args: Any) -> Any:
            for _ in range(_CALLS):
                since = time.perf_counter()
                returned = function(*args)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - since)
            return returned

        return calls

    run(timed)
    return min(times[1:])
