"""Mixed precision: computes a part of a graph in bfloat16 if the whole graph is not exact enough.

An early rounding error passes through all later operations: the first third of a ResNet's
convolutions causes nearly all of its error in bfloat16. So the first products are kept in float32,
as few of them as possible.

Their number is found by bisection, before an engine is built: the rewritten graph runs eagerly on
the first call's inputs, and its numbers are compared with eager's. Engines also round at other
places. So the engine's own numbers are compared in the end, and decide.

Related work: HAWQ (arXiv:1905.03696) chooses a precision for each layer of a quantized model by the
layer's share of the error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.chain.eager_fallback import make_fallback
from composer.chain.precision import Stays, narrow
from composer.chain.verify import Run, run
from composer.graphs.comparison import LowPrecisionBounds, is_inexact
from composer.passes.resolve import SharedPasses
from composer.records import GraphRequest
from composer.system import control_flow

_STEPS, _FEWEST = 32, 4
"""The products are divided into 32 steps. bfloat16 is worth it for at least 4 of them."""

_HOPELESS = 2.0
"""An engine is not tried entirely in bfloat16 if the error measured here is more than this many
times the allowed error. Engines do not differ that much from the graph that runs here."""

_MARGINS = (0.9, 0.6)
"""The shares of the allowed error that a part may have here. The second is used if an engine fails
with the first. The rest is left for the engine's additional rounding."""

_LONG = 2.0
"""If one run takes more seconds than this, no part is looked for, since that needs many runs."""


def parts(request: GraphRequest, bounds: LowPrecisionBounds, shared: SharedPasses) -> Iterator[int]:
    """Yield how many of the first products to keep in float32, in the order to try.

    The first number is 0, unless the error with all products in bfloat16 is far too large. Each
    further number is searched only when it is asked for.

    Args:
        request: The graph, and the first call's inputs.
        bounds: How far numbers may be off.
        shared: The passes of the later stages, which the compared graphs run too.
    """
    tried: set[int] = set()
    try:
        errors = _Errors(request, bounds, shared)
        if errors.of(0) <= _HOPELESS or not errors.first_within(_MARGINS[0]):
            tried.add(0)
            errors.let_go()
            yield 0
        for margin in _MARGINS:
            in_fp32 = errors.first_within(margin)
            if in_fp32 and in_fp32 not in tried:
                tried.add(in_fp32)
                errors.let_go()
                yield in_fp32
    except (Stays, _NotMeasured):
        if not tried:
            yield 0


class _NotMeasured(Exception):
    """The graph cannot be run to compare its numbers, or a run takes too long."""


class _Errors:
    """Measures the error of a graph with all but the first few products in bfloat16.

    Raises:
        Stays: the graph has no such product, or is not to be tried in bfloat16.
    """

    def __init__(
        self, request: GraphRequest, bounds: LowPrecisionBounds, shared: SharedPasses
    ) -> None:
        self._request, self._bounds, self._shared = request, bounds, shared
        self._products = narrow(request, tentative=True, marks=True).products
        self._errors: dict[tuple[float, int], float] = request.made_of_graph().setdefault(
            "errors", {}
        )
        self._inputs = list(map(_torch.symbols.hint, request.example_inputs))
        self._eager: Run | None = None

    def of(self, in_fp32: int) -> float:
        """Return the largest error of any value, as a multiple of the allowed error.

        Raises:
            _NotMeasured: eager itself cannot be run, draws random numbers, or takes too long.
        """
        key = self._bounds.share, in_fp32
        if key not in self._errors:
            eager = self._eager = self._eager or self._run_of_eager()
            self._errors[key] = self._measured(in_fp32, eager)
        return self._errors[key]

    def first_within(self, margin: float) -> int:
        """Return the fewest products to keep in float32 for an error of at most ``margin``.

        The result is 0 if too few products would be left for bfloat16.

        Raises:
            _NotMeasured: as for :meth:`of`.
        """
        without, within = 0, _STEPS - _FEWEST + 1
        while within - without > 1:
            middle = (without + within) // 2
            if self.of(self._at(middle)) <= margin:
                within = middle
            else:
                without = middle
        return self._at(within) if within <= _STEPS - _FEWEST else 0

    def let_go(self) -> None:
        """Release eager's values, so that they take no memory while an engine is built."""
        self._eager = None

    def _at(self, step: int) -> int:
        return step * self._products // _STEPS

    def _run_of_eager(self) -> Run:
        try:
            eager = self._run(self._fallback(self._request))
        except BaseException as error:
            control_flow.pass_on(error)
            raise _NotMeasured from error
        if eager.random:
            raise _NotMeasured
        return eager

    def _run(self, forward: Callable[..., Any]) -> Run:
        started = time.perf_counter()
        found = run(forward, self._inputs, self._request)
        if time.perf_counter() - started > _LONG:
            raise _NotMeasured
        return found

    def _fallback(self, request: GraphRequest) -> Callable[..., Any]:
        fallback, _ = make_fallback(request, self._shared)
        return fallback

    def _measured(self, in_fp32: int, eager: Run) -> float:
        try:
            narrowed = narrow(self._request, tentative=True, in_fp32=in_fp32)
            run = narrowed.around(self._fallback(narrowed.request))
            got = self._run(run).values
            errors = [_off(got[name], value, self._bounds) for name, value in eager.values.items()]
            return max(errors, default=0.0)
        except _NotMeasured:
            raise
        except BaseException as error:  # noqa: BLE001  # what cannot be run is no part to try
            control_flow.pass_on(error)
            return math.inf


def _off(mine: Any, eagers: Any, bounds: LowPrecisionBounds) -> float:
    """Return a value's largest error divided by the allowed error; infinite if none is allowed."""
    if not isinstance(mine, torch.Tensor) or not isinstance(eagers, torch.Tensor):
        return 0.0
    if not is_inexact(eagers):
        return 0.0 if torch.equal(mine, eagers) else math.inf
    if not eagers.numel():
        return 0.0
    wide = eagers.to(torch.complex128 if eagers.is_complex() else torch.float64)
    by_allowed = (mine.to(wide.dtype) - wide).abs() / bounds.allowed(wide, eagers.dtype)
    by_allowed[torch.isclose(mine, eagers, rtol=0, atol=0, equal_nan=True)] = 0.0
    return float(by_allowed.nan_to_num(nan=math.inf, posinf=math.inf).max())
