"""The faults of fake engines: each is a few lines that run in the compile or at calls."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import torch
import torch.fx

from composer import _torch
from composer.registry import did_you_mean

_HOG_LIMIT = 8 << 30
_HOG_STEP = 64 << 20


class Fault(StrEnum):
    """One way in which an engine fails."""

    RAISES = "raises"
    OUT_OF_MEMORY = "out_of_memory"
    EXITS = "exits"
    OS_EXITS = "os_exits"
    SEGFAULTS = "segfaults"
    EATS_MEMORY = "eats_memory"
    SLOW = "slow"
    HANGS = "hangs"
    RETURNS_NONE = "returns_none"
    RETURNS_GRAPH = "returns_graph"
    MUTATES_GRAPH = "mutates_graph"
    MUTATES_INPUTS = "mutates_inputs"
    MUTATES_INPUTS_AND_RAISES = "mutates_inputs_and_raises"
    NAN = "nan"
    WRONG_VALUE = "wrong_value"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_STRIDE = "wrong_stride"
    FAILS_IN_BACKWARD = "fails_in_backward"

    @classmethod
    def _missing_(cls, value: object) -> None:
        """Raise for an unknown fault, and name the nearest known one."""
        raise ValueError(f"unknown fault {value!r}{did_you_mean(str(value), map(str, cls))}")


class Struck(Protocol):
    """The data of the fake engine that its fault can use."""

    __name__: str
    seconds: float


GO_ON = object()
"""Returned by a fault in the compile after which the compile goes on."""


def _raise(backend: Struck, *_: Any) -> Any:
    raise RuntimeError(f"{backend.__name__} was made to raise")


def _run_out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("tried to allocate 80 GiB")


def _exit(*_: Any) -> Any:
    sys.exit(3)


def _os_exit(*_: Any) -> Any:
    os._exit(3)


def _segfault(*_: Any) -> Any:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(0)


def _eat_memory(*_: Any) -> Any:
    """Fill memory until there is no more or 8 GiB are taken, to spare the user's machine."""
    held: list[bytes] = []
    while len(held) * _HOG_STEP < _HOG_LIMIT:
        held.append(b"\1" * _HOG_STEP)
    raise MemoryError("took 8 GiB")


def _hang(*_: Any) -> Any:
    while True:
        time.sleep(0.05)


def _sleep(backend: Struck, *_: Any) -> Any:
    time.sleep(backend.seconds)
    return GO_ON


def _return_none(*_: Any) -> Any:
    return None


def _return_graph(_: Struck, gm: torch.fx.GraphModule, __: Any) -> Any:
    return gm.forward


def _mutate_graph(_: Struck, gm: torch.fx.GraphModule, __: Any) -> Any:
    """Remove everything except the inputs from the graph, then fail."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.find_nodes(op="output"):
                node.args = ((),)
            module.graph.eliminate_dead_code()
            module.recompile()
    raise RuntimeError("failed after changing the graph")


def _overwrite(_: Struck, __: Any, inputs: Sequence[Any]) -> Any:
    for value in inputs:
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            with torch.no_grad():
                value.detach().fill_(0)
                torch.autograd.graph.increment_version(value)
    return GO_ON


def run_honest(_: Struck, honest: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Give the right answer to a call."""
    return honest(*args)


def _then_run(strike: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fault that runs ``strike`` and then gives the right answer."""

    def run(backend: Struck, honest: Callable[..., Any], args: Sequence[Any]) -> Any:
        strike(backend, None, args)
        return honest(*args)

    return run


def _then_raise(backend: Struck, honest: Callable[..., Any], args: Sequence[Any]) -> Any:
    _overwrite(backend, None, args)
    _raise(backend)


def _spoiled(
    spoil: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Struck, Callable[..., Any], Sequence[Any]], Any]:
    """Return a fault that changes the first floating-point tensor of the right answer."""

    def run(_: Struck, honest: Callable[..., Any], args: Sequence[Any]) -> Any:
        outputs = list(honest(*args))
        for index, value in enumerate(outputs):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                outputs[index] = spoil(value)
                break
        return outputs

    return run


def _with_nan(value: torch.Tensor) -> torch.Tensor:
    first = torch.zeros_like(value).flatten()
    first[:1] = float("nan")
    return value + first.view(value.shape)


def _off_by_a_tenth(value: torch.Tensor) -> torch.Tensor:
    if not value.numel():
        return value
    return value + 0.1 * value.detach().abs().max().clamp(min=1)


def _of_other_dtype(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype == torch.float64 else value.double()


def _of_other_strides(value: torch.Tensor) -> torch.Tensor:
    if value.dim() <= 1:
        return value
    return value.transpose(0, -1).contiguous().transpose(0, -1)


def failing_backward(gm: torch.fx.GraphModule, inputs: list[Any], at: int) -> Callable[..., Any]:
    """Compile through AOTAutograd with a backward that raises from its run ``at`` on."""
    numbers = itertools.count(1)

    def honest(functional: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return _torch.aot.boxed(_torch.sources.settled_forward(functional))

    def failing(functional: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        run = _torch.sources.settled_forward(functional)

        def backward(*args: Any) -> Any:
            if next(numbers) >= at:
                raise RuntimeError("the backward was made to raise")
            return run(*args)

        return _torch.aot.boxed(backward)

    return _torch.aot.aot_compile(
        gm,
        inputs,
        forward=honest,
        backward=failing,
        inference=honest,
        partition=_torch.aot.min_cut,
        decompositions={},
    )


_ANYWHERE: Mapping[Fault | None, Callable[..., Any]] = {
    Fault.RAISES: _raise,
    Fault.OUT_OF_MEMORY: _run_out_of_memory,
    Fault.EXITS: _exit,
    Fault.OS_EXITS: _os_exit,
    Fault.SEGFAULTS: _segfault,
    Fault.EATS_MEMORY: _eat_memory,
    Fault.HANGS: _hang,
    Fault.RETURNS_NONE: _return_none,
}

WHILE_COMPILING: Mapping[Fault | None, Callable[..., Any]] = {
    **_ANYWHERE,
    Fault.SLOW: _sleep,
    Fault.RETURNS_GRAPH: _return_graph,
    Fault.MUTATES_GRAPH: _mutate_graph,
    Fault.MUTATES_INPUTS: _overwrite,
}

AT_CALLS: Mapping[Fault | None, Callable[..., Any]] = {
    **_ANYWHERE,
    Fault.SLOW: _then_run(_sleep),
    Fault.MUTATES_INPUTS: _then_run(_overwrite),
    Fault.MUTATES_INPUTS_AND_RAISES: _then_raise,
    Fault.NAN: _spoiled(_with_nan),
    Fault.WRONG_VALUE: _spoiled(_off_by_a_tenth),
    Fault.WRONG_SHAPE: _spoiled(lambda value: value.unsqueeze(0)),
    Fault.WRONG_DTYPE: _spoiled(_of_other_dtype),
    Fault.WRONG_STRIDE: _spoiled(_of_other_strides),
    Fault.FAILS_IN_BACKWARD: run_honest,
}
