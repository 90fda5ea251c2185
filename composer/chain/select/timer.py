"""Times engines on copies of the first call's inputs, and restores whatever a call changes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from composer import _torch
from composer.chain import verify
from composer.errors import refuse
from composer.graphs import clones, writes
from composer.graphs.comparison import devices, pattern, requires_grad
from composer.records import GraphRequest, Reason, Status


class Timer:
    """Times calls of one graph on copied inputs, and starts every call from the same state.

    A graph that writes to its inputs needs the same state: numbers that grow from call to call
    would become infinite, or an index out of range.
    """

    def __init__(self, request: GraphRequest) -> None:
        self._request = request
        self._inputs = list(map(_torch.symbols.hint, request.example_inputs))
        self._writes = writes.may_write(request.gm)
        self._buffers = clones.Buffers(request)
        self._left_alone = clones.LeftAlone(request)
        self._knows_writes = writes.is_known(request.gm)
        self._stand_ins: list[Any] = []
        self._leaves: list[torch.Tensor] = []
        self._weights: dict[int, torch.Tensor] = {}
        self._devices = _accelerators(self._inputs)

    @contextlib.contextmanager
    def laid_out(self) -> Iterator[None]:
        """Copy the inputs; when the context ends, put back buffers and the random state.

        Raises:
            TypeError: the graph writes to an input that cannot be copied.
        """
        with (
            _torch.fakes.unset_fake_temporarily(),
            _torch.modes.without_save_hooks(),
            torch.random.fork_rng(devices=devices(self._inputs)),
        ):
            self._lay_out()
            try:
                yield
            finally:
                self._buffers.restore()
                self._stand_ins, self._leaves = [], []

    def _lay_out(self) -> None:
        self._stand_ins, copies = verify.copy_for_run(self._inputs, self._request)
        sources = filter(requires_grad, (*copies, *self._request.gm.parameters()))
        self._leaves = [each for each in sources if each.is_leaf]

    def time(self, run: Callable[..., Any], calls: int, lead: float) -> float:
        """Return the seconds of a call, from several calls together, or one if the graph writes.

        Args:
            run: The callable.
            calls: How many calls to time together.
            lead: Seconds of calls before timing begins; at least one call unless it is 0.

        Raises:
            Refusal: ``rejected``, if parameters were written to that the graph does not write to.
            Exception: whatever ``run`` raises.
        """
        until = time.perf_counter() + lead
        while lead and time.perf_counter() < until:
            self._timed(run, 1)
        seconds = self._timed(run, calls)
        if self._knows_writes and self._left_alone.written():
            self._left_alone = clones.LeftAlone(self._request)  # do not blame the next participant
            refuse(Status.REJECTED, Reason.MUTATED_INPUTS, verify.WROTE_TO_WEIGHTS)
        return seconds

    def _timed(self, run: Callable[..., Any], calls: int) -> float:
        if self._writes:
            calls = 1
            self._buffers.restore()
            self._lay_out()
        self._settle()
        started = time.perf_counter()
        for _ in range(calls):
            self._call(run)
        self._settle()
        return (time.perf_counter() - started) / calls

    def _settle(self) -> None:
        """Wait until the devices have finished their work."""
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def _call(self, run: Callable[..., Any]) -> None:
        outputs = verify.outputs_of(run(*self._stand_ins))
        if not self._request.training or not self._leaves:
            return
        roots = {i: each for i, each in enumerate(outputs) if requires_grad(each)}
        if not roots:
            return
        weights = list(itertools.starmap(self._weight, roots.items()))
        with _torch.modes.own_backward(self._leaves):
            torch.autograd.grad(list(roots.values()), self._leaves, weights, allow_unused=True)

    def _weight(self, index: int, root: torch.Tensor) -> torch.Tensor:
        """The gradient of an output that a backward starts from; made once, at the first call."""
        if index not in self._weights:
            self._weights[index] = pattern(root.detach())
        return self._weights[index]


def _accelerators(values: Sequence[Any]) -> list[torch.device]:
    """Return the tensors' devices that compute asynchronously to the host."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    found = {each.device for each in values if isinstance(each, torch.Tensor)}
    return sorted((each for each in found if each.type == accelerator.type), key=str)
