"""Runs a graph by an engine and in eager mode, and says whether the engine is wrong.

A folder of :mod:`composer.graphs.case` has a copy of this file, which needs torch alone. The engine
runs in a child process. So a crash or a hang is seen as well.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import math
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_CHILD = "--in-child"

RIGHT, WRONG, UNKNOWN = 0, 1, 2
"""Exit statuses: the fault does not show, it shows, or eager mode itself fails on these values."""

_TOLERANCES = {
    torch.float64: (1e-7, 1e-15),
    torch.float32: (1e-3, 1e-7),
    torch.float16: (4e-3, 1e-5),
    torch.bfloat16: (2e-2, 1e-5),
}
_OTHER = (1e-1, 1e-5)
_TIMES_EAGERS = 3.0

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
    """

    grad: bool = False
    autocast: Sequence[tuple[str, torch.dtype]] = ()
    seconds: float = 300.0
    rtol: float | None = None
    atol: float | None = None


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
        before = torch.manual_seed(0).get_state()
        expected = values_of(graph(), inputs(), lambda module: module, settings)
    except Exception:  # noqa: BLE001  # it is printed
        traceback.print_exc()
        _say("eager mode fails on these values, so nothing can be said of the engine")
        return UNKNOWN
    draws = not torch.equal(before, torch.get_rng_state())
    exact = {} if draws else exact_values(graph(), inputs(), settings)
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
    differences: list[str] = []
    if got.keys() != expected.keys():
        differences.append(f"{len(got)} values, eager has {len(expected)}")
    for name in expected.keys() & got.keys():
        why = difference(got[name], expected[name], exact.get(name), settings)
        if why:
            differences.append(f"{name} {why}")
    _say("\n".join(sorted(differences) or [f"{len(expected)} values are eager's"]))
    if differences and draws:
        _say("the graph draws random numbers, and an engine may draw others")
        return UNKNOWN
    return WRONG if differences else RIGHT


def values_of(
    module: torch.nn.Module,
    inputs: list[Any],
    engine: Callable[[torch.nn.Module], Callable[..., Any]],
    settings: Settings,
) -> dict[str, Any]:
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
    found = outputs | _gradients(outputs, sources)
    found |= {f"{name} afterwards": each for name, each in sources.items()}
    return {name: _detached(each) for name, each in found.items()}


def _state(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _gradients(outputs: dict[str, Any], sources: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients of all inputs and weights that require one."""
    roots = [*filter(_requires_grad, outputs.values())]
    leaves = {name: x for name, x in sources.items() if _requires_grad(x) and x.is_leaf}
    if not roots or not leaves:
        return {}
    seeds = [(torch.arange(x.numel(), device=x.device) % 7 + 1).view(x.shape).to(x) for x in roots]
    found = torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
    return {f"gradient of {name}": x for name, x in zip(leaves, found, strict=True)}


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def exact_values(module: torch.nn.Module, inputs: list[Any], settings: Settings) -> dict[str, Any]:
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


def difference(got: Any, expected: Any, exact: Any, settings: Settings) -> str:
    """Return how a value differs from eager's; empty if it is near enough."""
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if isinstance(got, float) and isinstance(expected, float):
            return difference(torch.tensor(got), torch.tensor(expected), None, settings)
        return "" if repr(got) == repr(expected) else f"is {got!r}, eager's is {expected!r}"
    kinds = [f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (got, expected)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}, eager's is {kinds[1]}"
    if not (got.is_floating_point() or got.is_complex()):
        count = int((got != expected).sum())
        return f"differs in {count} of {got.numel()} elements" if count else ""
    wide = torch.complex128 if got.is_complex() else torch.float64
    mine = got.to(wide)
    eagers = expected.to(wide)
    finite = eagers.isfinite()
    if not torch.isclose(mine[~finite], eagers[~finite], equal_nan=True).all():
        return "has no NaN or infinity where eager has one"
    if not mine[finite].isfinite().all():
        return "has a NaN or infinity where eager has none"
    mine = mine[finite]
    eagers = eagers[finite]
    if not eagers.numel():
        return ""
    right = eagers
    own_error = 0.0
    if isinstance(exact, torch.Tensor) and exact.shape == got.shape:
        right = exact.to(wide)[finite]
        own_error = float((eagers - right).abs().max())
    if not math.isfinite(own_error):  # float64 has numbers that overflow in this dtype
        right = eagers
        own_error = 0.0
    usual = _TOLERANCES.get(got.dtype, _OTHER)
    rtol = usual[0] if settings.rtol is None else settings.rtol
    atol = usual[1] if settings.atol is None else settings.atol
    size = right.abs()
    scale = float(size.square().mean().sqrt())
    allowed = atol + rtol * size.clamp(min=scale) + _TIMES_EAGERS * own_error
    error = (mine - right).abs()
    count = int((error > allowed).sum())
    if not count:
        return ""
    against = "eager" if right is eagers else f"float64, and eager's error is {own_error:.3g}"
    return f"is off by {float(error.max()):.3g} in {count} of {got.numel()} elements ({against})"
