"""Runs a graph by an engine and in eager mode, and says whether the engine is wrong.

A folder of :mod:`composer.graphs.case` has a copy of this file and of what it imports, which need
torch alone. The engine runs in a child process. So a crash or a hang is seen as well.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer.graphs.comparison import (
    Bounds,
    LowPrecisionBounds,
    Mismatch,
    Values,
    detached_copy,
    gradients,
    is_gradient,
    largest_gradient,
    mismatch_of,
)

_CHILD = "--in-child"

RIGHT, WRONG, UNKNOWN = 0, 1, 2
"""Exit statuses: the fault does not show, it shows, or eager mode itself fails on these values."""

_STARTING = 60.0
"""Seconds for imports and eager mode, besides the time limit of the engine."""

SHOWS = "the fault shows"


@dataclass(frozen=True)
class Settings:
    """How the graph runs.

    Attributes:
        grad: True to run a backward as well.
        autocast: Device types and dtypes of autocast.
        seconds: The time limit.
        rtol: The relative tolerance; ``None`` for that of the dtype.
        atol: The absolute tolerance; ``None`` for that of the dtype.
        share: In low precision, the allowed error as a share of the largest number; else ``None``.
    """

    grad: bool = False
    autocast: Sequence[tuple[str, torch.dtype]] = ()
    seconds: float = 300.0
    rtol: float | None = None
    atol: float | None = None
    share: float | None = None

    @property
    def bounds(self) -> Bounds:
        """How far numbers may be off."""
        if self.share is not None:
            return LowPrecisionBounds(share=self.share)
        return Bounds(self.rtol, self.atol)


def main(
    graph: Callable[[], torch.nn.Module],
    inputs: Callable[[], list[Any]],
    engine: Callable[[torch.nn.Module], Callable[..., Any]],
    settings: Settings = Settings(),
) -> None:
    """Compare an engine with eager mode, print the result, and exit with :data:`WRONG` or another.

    Args:
        graph: Makes the graph, with the same weights each time.
        inputs: Makes the inputs, the same each time.
        engine: Returns a function that runs the graph.
        settings: How the graph runs.
    """
    if sys.argv[1:2] == [_CHILD]:
        room = Path(sys.argv[2])
        code = judged(graph, inputs, engine, settings, (room / "ready").touch)
        (room / "verdict").write_text(str(code))
        sys.exit(code)
    limit = _STARTING + settings.seconds
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        command = [sys.executable, sys.argv[0], _CHILD, name]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, timeout=limit)
        if (room / "verdict").exists():
            _end(int((room / "verdict").read_text()), "")
        if not (room / "ready").exists():
            _end(UNKNOWN, "eager mode does not end, or it ends the process")
        _end(WRONG, f"the engine ends the process, or hangs for {settings.seconds:g} seconds")


def _end(code: int, what: str) -> None:
    shown = {RIGHT: "the fault does not show", WRONG: SHOWS, UNKNOWN: "unknown"}[code]
    _say(f"{what}\n{shown}".strip())
    sys.exit(code)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def judged(
    graph: Callable[[], torch.nn.Module],
    inputs: Callable[[], list[Any]],
    engine: Callable[[torch.nn.Module], Callable[..., Any]],
    settings: Settings,
    ready: Callable[[], object] = lambda: None,
) -> int:
    """Run both, and print how they differ; call ``ready`` after eager mode."""
    try:
        expected = Expected.of(graph, inputs, settings)
    except Exception:  # noqa: BLE001  # it is printed
        traceback.print_exc()
        _say("eager mode fails on these values, so nothing can be said of the engine")
        return UNKNOWN
    ready()
    faulthandler.dump_traceback_later(settings.seconds, exit=True)
    try:
        got = values_of(graph(), inputs(), engine, settings)
    except BaseException as error:  # noqa: BLE001  # an engine may also end the process by SystemExit
        traceback.print_exc()
        _say(f"the engine raises {type(error).__name__}")
        return UNKNOWN if isinstance(error, ImportError) else WRONG
    finally:
        faulthandler.cancel_dump_traceback_later()
    differences = expected.differences(got)
    lines = [f"{name} {why}".lstrip() for name, (_, why) in sorted(differences.items())]
    _say("\n".join(lines or [f"{len(got)} values are eager's"]))
    if differences and expected.draws:
        _say("the graph draws random numbers, and an engine may draw others")
        return UNKNOWN
    return WRONG if differences else RIGHT


@dataclass(frozen=True)
class Expected:
    """What eager mode computes.

    Attributes:
        values: Outputs, gradients, and the inputs and weights after the call, by name.
        exact: The same in float64; nothing if the graph does not run so.
        draws: True if the graph draws random numbers, of which an engine may draw others.
        settings: How the graph runs.
    """

    values: Values
    exact: Values
    draws: bool
    settings: Settings

    @staticmethod
    def of(
        graph: Callable[[], torch.nn.Module], inputs: Callable[[], list[Any]], settings: Settings
    ) -> Expected:
        """Run a graph in eager mode, and in float64."""
        before = torch.manual_seed(0).get_state()
        values = values_of(graph(), inputs(), lambda module: module, settings)
        draws = not torch.equal(before, torch.get_rng_state())
        exact = {} if draws else exact_values(graph(), inputs(), settings)
        return Expected(values, exact, draws, settings)

    def differences(self, got: Values) -> dict[str, tuple[Mismatch, str]]:
        """Return how an engine's values differ, by name; their number is named by nothing."""
        found: dict[str, tuple[Mismatch, str]] = {}
        if got.keys() != self.values.keys():
            counts = f"{len(got)} values, eager has {len(self.values)}"
            found[""] = (Mismatch.STRUCTURE, counts)
        largest = largest_gradient(self.exact or self.values)
        for name in got.keys() & self.values.keys():
            mismatch = mismatch_of(
                got[name],
                self.values[name],
                self.exact.get(name),
                self.settings.bounds,
                largest if is_gradient(name) else 0.0,
            )
            if mismatch is not None:
                found[name] = mismatch
        return found


def values_of(
    module: torch.nn.Module,
    inputs: list[Any],
    engine: Callable[[torch.nn.Module], Callable[..., Any]],
    settings: Settings,
) -> Values:
    """Return outputs, gradients, and the inputs and weights after the call, by name."""
    sources = {f"input {i}": each for i, each in enumerate(inputs)}
    sources |= {f"attribute {name}": each for name, each in _state(module)}
    torch.manual_seed(0)
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.set_grad_enabled(settings.grad))
        for device, dtype in settings.autocast:
            modes.enter_context(torch.autocast(device, dtype))
        returned = engine(module)(*inputs)
    if not isinstance(returned, tuple | list):
        returned = [returned]
    outputs = {f"output {i}": each for i, each in enumerate(returned)}
    found = outputs | gradients(outputs, sources)
    found |= {f"{name} afterwards": each for name, each in sources.items()}
    return {name: detached_copy(each) for name, each in found.items()}


def _state(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def exact_values(module: torch.nn.Module, inputs: list[Any], settings: Settings) -> Values:
    """Return eager's values in float64; nothing if the graph does not run so."""
    double = [_in_float64(each) for each in inputs]
    try:
        plain = Settings(grad=settings.grad)
        return values_of(copy.deepcopy(module).double(), double, lambda each: each, plain)
    except Exception:  # noqa: BLE001  # such as an operator that asks for float32
        return {}


def _in_float64(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)
