"""Runs a function repeatedly with equal inputs and equal random state, and compares the results.

The results of a run are its outputs, the inputs and the module's tensors after the run, and
gradients if inputs or parameters require grad.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer import _torch
from composer.errors import first_line
from composer.graphs.clones import copy_inputs
from composer.graphs.comparison import (
    Values,
    detached_copy,
    devices,
    gradients,
    is_same_number,
    wide,
)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Deviation:
    """A value that differs between two runs.

    ``absolute`` and ``relative`` are its largest errors. They are ``nan`` if shapes or types
    differ.
    """

    value: str
    absolute: float
    relative: float
    message: str

    def __str__(self) -> str:
        """Return one line of text."""
        if math.isnan(self.absolute):
            return f"{self.value}: {first_line(self.message)}"
        return f"{self.value} is off by {self.absolute:.3g} (relative {self.relative:.3g})"


@dataclass(frozen=True, slots=True)
class Program:
    """A function or module with its inputs. No run changes the inputs."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self, compiled: Wrap | None = None) -> Values:
        """Run the program and return its results; then restore random state and module tensors.

        Args:
            compiled: Compiles the function before the run, if given.
        """
        leaves, restore = _torch.tensors.flatten((tuple(self.args), dict(self.kwargs)))
        inputs = copy_inputs([_leaf(each) for each in leaves], keep=frozenset())
        args, kwargs = restore(inputs)
        state = _state_of(self.fn)
        with torch.random.fork_rng(devices=devices(leaves)), _restored(state):
            run = compiled(self.fn) if compiled else self.fn
            returned = run(*args, **kwargs)
            given = {f"input {i}": each for i, each in enumerate(inputs)}
            return _values(returned, given, state)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Program:
        """Return the program with ``change`` applied to each floating-point input."""
        leaves, restore = _torch.tensors.flatten((tuple(self.args), dict(self.kwargs)))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaves[i] = change(leaf.detach())
        args, kwargs = restore(leaves)
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def training(self) -> Program:
        """Return the program with floating-point inputs that require grad."""
        return self.changed(lambda value: value.clone().requires_grad_())


def compiled_anew(fn: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Reset the compiler, and return ``fn`` compiled by composer with these options."""
    torch.compiler.reset()
    return torch.compile(fn, backend="composer", options=options)


def _values(returned: Any, inputs: Values, state: Values) -> Values:
    outputs = {f"output {i}": each for i, each in enumerate(_torch.tensors.flatten(returned)[0])}
    wanted = gradients(outputs, inputs | state, _torch.modes.own_backward)
    after = {f"{name} afterwards": each for name, each in (inputs | state).items()}
    return {name: detached_copy(each) for name, each in (outputs | after | wanted).items()}


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _state_of(fn: Callable[..., Any]) -> Values:
    """Return the parameters and buffers of a module, or of the module that owns the method."""
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    if not isinstance(owner, torch.nn.Module):
        return {}
    return dict(owner.named_parameters()) | dict(owner.named_buffers())


@contextlib.contextmanager
def _restored(state: Values) -> Iterator[None]:
    kept = {name: value.detach().clone() for name, value in state.items()}
    recorded = {name for name, value in state.items() if value.requires_grad}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in state.items():
                if value.requires_grad and name not in recorded and not value._is_view():
                    value.detach_()  # a buffer, into which autograd has recorded the run
                value.copy_(kept[name])


def deviation(
    got: Values, expected: Values, tolerance: Mapping[str, float] | None = None
) -> Deviation | None:
    """Return the first value that differs between two runs, or ``None``.

    Args:
        got: The results to check.
        expected: The correct results.
        tolerance: ``{"rtol": ..., "atol": ...}``; the default is that of ``torch.testing`` for the
            dtype.
    """
    bounds: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, **tolerance} if tolerance else {}
    if list(got) != list(expected):
        what = f"{list(got)} instead of {list(expected)}"
        return Deviation("number of values", math.nan, math.nan, what)
    for name, value in expected.items():
        found = _deviation(name, got[name], value, bounds)
        if found is not None:
            return found
    return None


def _deviation(name: str, got: Any, expected: Any, bounds: dict[str, Any]) -> Deviation | None:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if is_same_number(got, expected):
            return None
        what = f"{got!r} instead of {expected!r}"
        return Deviation(name, math.nan, math.nan, what)
    try:
        torch.testing.assert_close(got, expected, equal_nan=True, **bounds)
    except AssertionError as error:
        return Deviation(name, *_sizes(got, expected), str(error))
    return None


def _sizes(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Return the largest absolute and the largest relative error."""
    if got.shape != expected.shape or not got.numel():
        return math.nan, math.nan
    error = (wide(got) - wide(expected)).abs()
    relative = (error / wide(expected).abs()).nan_to_num(0.0, posinf=math.inf)
    return float(error.max()), float(relative.max())
