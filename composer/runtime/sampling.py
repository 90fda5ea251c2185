"""``verify = "sample"``: at every N-th call, the engine's answer is compared with eager's.

The eager fallback runs first, on copies of the call's inputs. Then the engine runs on the inputs
themselves, from the same random state, so the answer that the user gets is the one that is judged.
No gradients are compared. Copies are made for these calls only.

If the answer is wrong, the copies are written back over everything that the engine wrote to. This
cannot undo what autograd has recorded for an input. So if a training graph writes to inputs in
place, the engine runs on copies only, and the eager fallback gives the answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer.chain import verify
from composer.errors import Refusal
from composer.graphs import clones, writes
from composer.graphs.comparison import Bounds, Values, detached_copy, devices
from composer.records import GraphRequest, Runtime
from composer.system import control_flow

Compiled = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Compares single calls of a graph with eager.

    Attributes:
        every: N; one call in N is compared.
        fallback: The eager fallback.
        exact: Computes the eager fallback in float64, for the inputs of a call and a request.
        request: Returns the graph's request with the inputs of a call.
        apart: True if the engine runs on copies only, and the eager fallback gives the answer.
        runtime: Counts the comparisons.
    """

    every: int
    fallback: Compiled
    exact: Callable[[Sequence[Any], GraphRequest], Values]
    request: Callable[[Sequence[Any]], GraphRequest]
    apart: bool
    runtime: Runtime

    def compare(
        self, run: Compiled, args: tuple[Any, ...], bounds: Bounds
    ) -> tuple[Any, Refusal | None]:
        """Call the engine ``run`` and compare its answer with the eager fallback's.

        Nothing is compared if the eager fallback itself raises or memory is short.

        Returns:
            The answer, and ``None`` or the refusal that says why the engine's answer is wrong. In
            that case, inputs, buffers and the random state were restored first.

        Raises:
            Exception: whatever the engine raises.
        """
        request = dataclasses.replace(self.request(args), training=False)
        try:
            eager = verify.run(self.fallback, args, request)
            call = None if self.apart else _Undoable(args, request)
        except BaseException as error:  # noqa: BLE001  # the program's own: the engine meets it too
            control_flow.pass_on(error)
            return run(*args), None
        if call is None:
            got = verify.run(run, args, request)
            exact = functools.partial(self.exact, args, request)
            refusal = self._verdict(lambda: got, eager, exact, bounds)
            return (None if refusal else self.fallback(*args)), refusal
        outputs = run(*args)
        exact = functools.partial(call.exact, self.exact)
        refusal = self._verdict(functools.partial(call.seen, outputs), eager, exact, bounds)
        if refusal:
            call.undo()
        return outputs, refusal

    def _verdict(
        self,
        got: Callable[[], verify.Run],
        eager: verify.Run,
        exact: Callable[[], Values],
        bounds: Bounds,
    ) -> Refusal | None:
        try:
            verify.judge(got(), eager, exact, bounds)
        except Refusal as refusal:
            self.runtime.compared()
            return refusal.with_traceback(None)  # its traceback would keep this frame alive
        except BaseException as error:  # noqa: BLE001  # of the comparison (memory), not the engine
            control_flow.pass_on(error)
            return None
        self.runtime.compared()
        return None


class _Undoable:
    """A call that is about to be made, with copies of everything that it may change."""

    def __init__(self, args: Sequence[Any], request: GraphRequest) -> None:
        parameters = {i for i in request.weights if isinstance(args[i], torch.nn.Parameter)}
        self._copies = clones.copy_inputs(args, keep=frozenset(parameters))
        self._args = args
        self._request = request
        self._buffers = clones.Buffers(request)
        self._generator = verify.generator_state(args)
        self._cpu = torch.get_rng_state()
        self._cuda = [(each, torch.cuda.get_rng_state(each)) for each in devices(args)]

    def seen(self, returned: Any) -> verify.Run:
        """Return the results of the call, given what the engine returned."""
        outputs = verify.named_outputs(returned)
        passed = verify.changeable(self._args, self._request)
        values = {name: detached_copy(each) for name, each in (outputs | passed).items()}
        generator = verify.generator_state(self._args)
        random = not torch.equal(self._generator, generator)
        return verify.Run(values, verify.strides_of(outputs), frozenset(), generator, random)

    def undo(self) -> None:
        """Restore everything that the call wrote to, and the random state."""
        for value, copy in zip(self._args, self._copies, strict=True):
            if copy is not value and isinstance(value, torch.Tensor):
                clones.put_back(value, copy)
        self._buffers.restore()
        self._rewind()

    def exact(self, exact: Callable[[Sequence[Any], GraphRequest], Values]) -> Values:
        """Return the values of the same call in float64, from the copies of its inputs.

        The result is empty if the graph writes to parameters or to tensors of its own. The engine
        has then changed them already, and there is no copy to start from.
        """
        gm, moved = self._request.gm, writes.written_parameters(self._request)
        if moved or writes.written_attributes(gm):
            return {}
        with torch.random.fork_rng(devices=devices(self._args)):
            self._rewind()
            return exact(self._copies, self._request)

    def _rewind(self) -> None:
        """Set torch's random generators back to their states before the call."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)


def cannot_undo(request: GraphRequest) -> bool:
    """Return True if autograd may record what a call of the graph writes to its inputs."""
    if not request.training:
        return False
    values = [request.example_inputs[i] for i in writes.assigned_inputs(request.gm)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
