"""Mixed precision: computes a part of a graph in low precision if the whole is not exact enough.

Few products cause most of the error: those whose rounding errors all later operations magnify, and
those of numbers with outliers. So these are kept in float32, as few of them as possible.

They are found before an engine is built. The products are divided into groups of neighbours. The
rewritten graph runs eagerly on the first call's inputs, with one group after the other in low
precision, and its numbers are compared with eager's. That ranks the groups by their shares of the
error. Bisection finds how many of them have to stay. Engines also round at other places. So the
engine's own numbers are compared in the end, and decide.

Related work: HAWQ (arXiv:1905.03696) chooses a precision for each layer of a quantized model by the
layer's share of the error.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from composer import _torch
from composer.chain.eager_fallback import make_fallback
from composer.chain.precision import Stays, narrow
from composer.chain.verify import Run, run
from composer.graphs.comparison import LowPrecisionBounds, is_inexact
from composer.passes.resolve import SharedPasses
from composer.records import GraphRequest, Int8, LowPrecision
from composer.system import control_flow

_GROUPS = 32
"""The products are divided into at most this many groups."""

_FEWEST = 1 / 8
"""Low precision is worth it for at least this share of the groups."""

_HOPELESS = 2.0
"""An engine is not tried entirely in low precision if the error measured here is more than this
many times the allowed error. Engines do not differ that much from the graph that runs here."""

_MARGINS = (0.9, 0.6)
"""The shares of the allowed error that a part may have here. The second is used if an engine fails
with the first. The rest is left for the engine's additional rounding."""

_LONG = 1.0
"""If one run takes more seconds than this, no part is looked for: that may need 40 runs. They are
seconds of CPU time of this thread, so what is found does not depend on the load of the machine."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What is rounded, and how far numbers may be off.

    Attributes:
        precision: The precision of the products.
        bounds: How far numbers may be off.
        in_order: True to keep the first products of the graph. An engine that chooses its precision
            itself can only compute the rest of a graph in low precision.
        int8: What the engine computes faster in eight bits.
    """

    precision: LowPrecision
    bounds: LowPrecisionBounds
    in_order: bool = False
    int8: Int8 = "products"


def parts(
    rounding: Rounding, request: GraphRequest, shared: SharedPasses
) -> Iterator[tuple[int, ...]]:
    """Yield which products to keep in float32, in the order to try.

    The first part is empty, unless the error with all products in low precision is far too large.
    Each further one is searched only when it is asked for.

    Args:
        rounding: What is rounded, and how far numbers may be off.
        request: The graph, and the first call's inputs.
        shared: The passes of the later stages, which the compared graphs run too.
    """
    tried: set[tuple[int, ...]] = set()
    try:
        search = _Search(rounding, request, shared)
        if search.of(()) <= _HOPELESS or not search.fewest_within(_MARGINS[0]):
            tried.add(())
            search.let_go()
            yield ()
        for margin in _MARGINS:
            wide = search.fewest_within(margin)
            if wide and wide not in tried:
                tried.add(wide)
                search.let_go()
                yield wide
    except (Stays, _NotMeasured):
        if not tried:
            yield ()


class _NotMeasured(Exception):
    """The graph cannot be run to compare its numbers, or a run takes too long."""


class _Search:
    """Measures the error of a graph with all but some of its products in low precision.

    Raises:
        Stays: the graph has no such product, or is not to be tried in this precision.
    """

    def __init__(self, rounding: Rounding, request: GraphRequest, shared: SharedPasses) -> None:
        self._rounding = rounding
        self._request = request
        self._shared = shared
        self._narrow = functools.partial(
            narrow, request, rounding.precision, tentative=True, int8=rounding.int8
        )
        products = self._narrow(marks=True).products
        count = min(products, _GROUPS)
        ends = [step * products // count for step in range(count + 1)]
        self._groups = [range(*each) for each in itertools.pairwise(ends)]
        self._errors: dict[Any, float] = request.made_of_graph().setdefault("errors", {})
        self._inputs = list(map(_torch.symbols.hint, request.example_inputs))
        self._eager: Run | None = None

    def of(self, wide: tuple[int, ...]) -> float:
        """Return the largest error of any value, as a multiple of the allowed error.

        Args:
            wide: The products that stay in float32.

        Raises:
            _NotMeasured: eager itself cannot be run, draws random numbers, or takes too long.
        """
        key = self._rounding, wide
        if key not in self._errors:
            eager = self._eager = self._eager or self._run_of_eager()
            self._errors[key] = self._measured(wide, eager)
        return self._errors[key]

    def fewest_within(self, margin: float) -> tuple[int, ...]:
        """Return the fewest products to keep in float32 for an error of at most ``margin``.

        The result is empty if too few products would be left for low precision.

        Raises:
            _NotMeasured: as for :meth:`of`.
        """
        ranked = self._groups if self._rounding.in_order else self._by_share()
        most = len(ranked) - math.ceil(len(ranked) * _FEWEST)
        without, within = 0, most + 1
        while within - without > 1:
            middle = (without + within) // 2
            if self.of(_all_of(ranked[:middle])) <= margin:
                within = middle
            else:
                without = middle
        return _all_of(ranked[:within]) if within <= most else ()

    def _by_share(self) -> list[range]:
        """Return the groups, those first that alone cause the largest errors."""
        if len(self._groups) == 1:
            return self._groups

        def share(group: range) -> float:
            return self.of(_all_of(each for each in self._groups if each is not group))

        return sorted(self._groups, key=share, reverse=True)

    def let_go(self) -> None:
        """Release eager's values, so that they take no memory while an engine is built."""
        self._eager = None

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
        started = time.thread_time()
        found = run(forward, self._inputs, self._request)
        if time.thread_time() - started > _LONG:
            raise _NotMeasured
        return found

    def _fallback(self, request: GraphRequest) -> Callable[..., Any]:
        fallback, _ = make_fallback(request, self._shared)
        return fallback

    def _measured(self, wide: tuple[int, ...], eager: Run) -> float:
        bounds = self._rounding.bounds
        try:
            narrowed = self._narrow(wide=wide)
            run = narrowed.around(self._fallback(narrowed.request))
            got = self._run(run).values
            errors = [_off(got[name], value, bounds) for name, value in eager.values.items()]
            return max(errors, default=0.0)
        except _NotMeasured:
            raise
        except BaseException as error:  # noqa: BLE001  # what cannot be run is no part to try
            control_flow.pass_on(error)
            return math.inf


def _all_of(groups: Iterable[range]) -> tuple[int, ...]:
    return tuple(sorted(itertools.chain.from_iterable(groups)))


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
