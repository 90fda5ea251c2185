"""Mixed precision: the part of a graph that holds in bfloat16 where the whole of it does not.

What is rounded early in a graph goes through all that follows: of a ResNet's error in bfloat16 the
first third of its convolutions make nearly all. So products are kept in float32 from the first on,
and no more of them than have to be.

How many is found by bisection, before an engine is built for the rest: the rewritten graph runs
eagerly on the first call's inputs, and its numbers are compared with eager's. Engines round at
other places, too, so theirs decide in the end.

Kin: what finds a precision for each layer of a quantized model by its share of the error (HAWQ,
arXiv:1905.03696).
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
from composer.graphs.comparison import LowPrecisionBounds
from composer.passes.resolve import SharedPasses
from composer.records import GraphRequest
from composer.system import control_flow

_STEPS, _FEWEST = 32, 4
"""Into how many steps the products are divided, and how many of those bfloat16 is worth it for."""

_HOPELESS = 2.0
"""How many times the error that is allowed is more than engines differ from what is run here."""

_MARGINS = (0.9, 0.6)
"""Which shares of the error that is allowed a part may make here, first and if that is not enough:
the engine has some left for what it rounds besides."""

_LONG = 2.0
"""Seconds of a run from which on it is not repeated to look for a part."""


def parts(request: GraphRequest, bounds: LowPrecisionBounds, shared: SharedPasses) -> Iterator[int]:
    """How many of the first products to keep in float32, in the order in which to try it.

    None at first, unless all in bfloat16 is beyond hope. Each is looked for when it is asked for.

    Args:
        request: The graph, and the first call's inputs.
        bounds: How far numbers may be off.
        shared: The passes of the later stages, which are part of the program.
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
    """The graph cannot be run to compare its numbers, or that would take too long."""


class _Errors:
    """How far a graph is off with its products in bfloat16 but for some of the first.

    Raises:
        Stays: it has no such product, or is not to be tried in bfloat16.
    """

    def __init__(
        self, request: GraphRequest, bounds: LowPrecisionBounds, shared: SharedPasses
    ) -> None:
        self._request, self._bounds, self._shared = request, bounds, shared
        self._products = narrow(request, on_trial=True, marks=True).products
        self._errors: dict[tuple[float, int], float] = request.made_of_graph().setdefault(
            "errors", {}
        )
        self._inputs = [_torch.symbols.hint(value) for value in request.example_inputs]
        self._eager: Run | None = None

    def of(self, in_fp32: int) -> float:
        """The largest error of any value, as a share of what is allowed.

        Raises:
            _NotMeasured: eager itself cannot be run, draws random numbers, or takes too long.
        """
        key = self._bounds.share, in_fp32
        if key not in self._errors:
            eager = self._eager = self._eager or self._run_of_eager()
            self._errors[key] = self._measured(in_fp32, eager)
        return self._errors[key]

    def first_within(self, margin: float) -> int:
        """The fewest products to keep so that the error is within; 0 where that are too many.

        Raises:
            _NotMeasured: as above.
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
        """Keep no values while an engine is built."""
        self._eager = None

    def _at(self, step: int) -> int:
        return step * self._products // _STEPS

    def _run_of_eager(self) -> Run:
        try:
            eager = self._run(self._fallback(self._request))
        except _NotMeasured:
            raise
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
            narrowed = narrow(self._request, on_trial=True, in_fp32=in_fp32)
            run = narrowed.around(self._fallback(narrowed.request))
            got = self._run(run).values
            pairs = ((got[name], value) for name, value in eager.values.items())
            return max((_off(mine, eagers, self._bounds) for mine, eagers in pairs), default=0.0)
        except _NotMeasured:
            raise
        except BaseException as error:  # noqa: BLE001  # what cannot be run is no part to try
            control_flow.pass_on(error)
            return math.inf


def _off(mine: object, eagers: object, bounds: LowPrecisionBounds) -> float:
    """The largest error of a value by what is allowed; infinite where nothing is."""
    if not isinstance(mine, torch.Tensor) or not isinstance(eagers, torch.Tensor):
        return 0.0
    if not eagers.is_floating_point() and not eagers.is_complex():
        return 0.0 if torch.equal(mine, eagers) else math.inf
    if not eagers.numel():
        return 0.0
    wide = eagers.to(torch.complex128 if eagers.is_complex() else torch.float64)
    by_allowed = (mine.to(wide.dtype) - wide).abs() / bounds.allowed(wide, eagers.dtype)
    by_allowed[torch.isclose(mine, eagers, rtol=0, atol=0, equal_nan=True)] = 0.0
    return float(by_allowed.nan_to_num(nan=math.inf, posinf=math.inf).max())
