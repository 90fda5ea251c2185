"""What every test gets: a clean Dynamo and composer session, torch's settings, no disk, no hub."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Before torch is imported: each process of pytest-xdist has a core, and children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # 3 % of a short test
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # where tests import ONNX Runtime themselves

import pytest
import torch
from forked import Interpreter

import composer
from composer import _torch, session
from composer.chain.candidates import entries_of
from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.self_test import SelfTest
from composer.policy import Policy
from composer.telemetry import jsonl

# Tracing leaves so much behind that by the default every fifteenth second is a search for garbage.
gc.set_threshold(20_000, 20, 20)
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # some plugin may have imported it before
# Dynamo empties the CPU's caches to time the guards of each graph for its log, which takes longer
# than all the rest of a small graph's compile.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
jsonl.EVERY = threading.TIMEOUT_MAX  # what a test finds in a file depends on no clock
# pytest reads each logger that hands nothing on, and torch writes its structured trace (each
# graph, many times over) as soon as anybody reads it.
torch._logging._internal.trace_log.propagate = True


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test over several lists, all but as many cases as the longest list has are thorough.

    Each choice of each list is among those that are not: the criterion "each choice" of Ammann and
    Offutt's Introduction to Software Testing. ``make test`` leaves out crosses alone.
    """
    for item in items:
        if item.get_closest_marker("thorough"):
            continue
        places = [_place(item, mark) for mark in item.iter_markers("parametrize")]
        longest = max((length for _, length in places), default=1)
        if not any(all(at == turn % of for at, of in places) for turn in range(longest)):
            item.add_marker("thorough")


def _place(item: Any, mark: pytest.Mark) -> tuple[int, int]:
    """Where this case is among those of a list that are not thorough, and how many these are."""
    names = mark.args[0]
    names = [each.strip() for each in names.split(",")] if isinstance(names, str) else names
    taken = [item.callspec.params[name] for name in names]
    cases = [_entry(each, len(names)) for each in mark.args[1]]
    cases = [each for each in cases if all(its.name != "thorough" for its in each.marks)]
    for place, case in enumerate(cases):
        if all(ours is theirs for ours, theirs in zip(taken, case.values, strict=True)):
            return place, len(cases)
    raise AssertionError(f"no case of {names} is that of {item.nodeid}")


def _entry(given: Any, names: int) -> Any:
    """What ``pytest.param`` makes of an entry of a list, if that was not made by it."""
    if isinstance(given, type(pytest.param())):
        return given
    return pytest.param(*given) if names > 1 else pytest.param(given)


@pytest.fixture(autouse=True, scope="module")
def _kept() -> None:
    """What is there by now stays, and collections of garbage need not look at it.

    composer collects it for each engine that it lets go of: after thousands of tests in a second.
    """
    gc.collect()
    gc.freeze()


def _let_work(*names: str) -> None:
    """Have engines proved themselves. Only the tests of that have it done anew."""
    request: Any = types.SimpleNamespace(device="cpu")
    for entry in entries_of(Policy(chain=names)):
        works = SelfTest(backend=entry.candidate.name, why="")
        fingerprint = Fingerprint(request, (entry.parts,))
        session.current().knowledge.learn(works, fingerprint, entry.cache, only_here=True)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path / "composer-cache"))
    torch.compiler.reset()
    composer.reset()
    session.current().numbers = itertools.count(1)
    session.current().positions.clear()
    _let_work("onnxrt", "openvino")
    torch.manual_seed(0)
    precision, dtype = _torch.modes.float32_precision(), torch.get_default_dtype()
    yield
    _torch.modes.set_float32_precision(
        precision
    )  # torch's own word does not put back all that it sets
    torch.set_default_dtype(dtype)
    torch.compiler.reset()


@pytest.fixture
def inference() -> Iterator[None]:
    """Grad mode is off, as where a program only runs a model."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def interpreter() -> Interpreter:
    """A Python in which torch and composer are there already."""
    return Interpreter()


@pytest.fixture
def run_python(interpreter: Interpreter) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a process of its own, forked from one that has imported torch and composer."""

    def run(code: str, *args: str, env: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
        return interpreter.run(["-c", code, *args], env={**os.environ, **(env or {})}, **kwargs)

    return run


@pytest.fixture(scope="session")
def fresh_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter: where imports, or what they read, are what is tested."""

    def run(code: str, env: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **(env or {})},
            check=False,
            **kwargs,
        )

    return run


@pytest.fixture
def newer_precision() -> None:
    """A setting of ``fp32_precision`` that no word of the older function stands for."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    """The ``onnx.GraphProto`` that ONNX Runtime made of the last model."""
    onnx = pytest.importorskip("onnx")
    session = importlib.import_module("composer.backends.onnxrt.session")
    own, path = session.session_options, tmp_path / "optimized.onnx"

    def saving(settings: Any) -> Any:
        options = own(settings)
        options.optimized_model_filepath = str(path)
        return options

    monkeypatch.setattr(session, "session_options", saving)
    return lambda: onnx.load(str(path)).graph


class _SimulatedTime:
    """A clock that goes on by what anybody sleeps, and a little at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 20e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def real_time() -> None:
    """For a test of a file of simulated time that itself is about the machine's."""


@pytest.fixture
def simulated_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is the fastest does not depend on the load, and nobody waits."""
    if "real_time" in request.fixturenames:
        return
    clock = _SimulatedTime()
    monkeypatch.setattr("time.perf_counter", clock.perf_counter)
    monkeypatch.setattr("time.sleep", clock.sleep)
    monkeypatch.setattr("composer.system.hardware.seconds_without_a_core", lambda: 0.0)
    monkeypatch.setattr("composer.system.hardware.seconds_of_others", lambda: None)
