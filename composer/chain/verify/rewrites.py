"""Runs the passes that come before every candidate, and checks ``keeps_numbers`` of all passes.

An engine is compared with the eager fallback, which runs the same passes. That comparison cannot
find an error of a pass. So a pass that declares ``keeps_numbers`` is compared here, before the
first candidate: the graph that the pass left is verified like a candidate against the graph without
the pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import Any

import torch.fx

from composer.build import BuildFacts
from composer.chain.eager_fallback import make_fallback
from composer.chain.verify.against_eager import changing, verify
from composer.errors import PassError, Refusal, text_of
from composer.graphs.checkpoints import eager_forward
from composer.graphs.comparison import Bounds
from composer.passes import before_autograd
from composer.passes.base import GraphPass
from composer.passes.resolve import SharedPasses
from composer.passes.snapshot import Snapshot
from composer.records import BEFORE_AUTOGRAD, GraphRequest, PassRecord
from composer.system import control_flow

Rewritten = tuple[GraphRequest, SharedPasses, tuple[PassRecord, ...]]
"""The rewritten graph, the passes that are still to run, and records of the passes that ran."""


def rewrite(request: GraphRequest, shared: SharedPasses, bounds: Bounds | None) -> Rewritten:
    """Run the passes of the stages ``torch`` and ``aten``.

    Args:
        request: The captured graph.
        shared: The passes of the policy.
        bounds: How far numbers may be off; ``None`` if the policy does not compare numbers.

    Raises:
        PassError: a pass failed, and the policy says ``on_pass_error = "raise"``.
    """
    check = None if bounds is None else _Check(request, bounds)
    rewritten, records = before_autograd.rewrite(request, shared, check=check)
    rewritten = dataclasses.replace(rewritten, rewritten_by=changing(records))
    if check is None:
        return rewritten, shared, records
    rewritten = dataclasses.replace(rewritten, compared_passes=frozenset(check.compared))
    return _hold_later(rewritten, shared, records, check.bounds)


class _Check:
    """Compares the graph that a pass left with the captured graph.

    After a pass that may change numbers, later passes are compared with the graph that it left.
    """

    def __init__(self, request: GraphRequest, bounds: Bounds) -> None:
        self.compared: set[str] = set()
        self._request = request
        self.bounds = bounds
        self._reference: torch.fx.GraphModule | None = request.gm

    def __call__(self, each: GraphPass, before: Snapshot, after: torch.fx.GraphModule) -> None:
        """Compare the graph that a pass left, if the pass declares that it keeps numbers.

        Raises:
            Refusal: the numbers differ.
        """
        if not each.keeps_numbers:
            self._reference = None
            return
        self._reference = self._reference or before.graph_module()
        reference = dataclasses.replace(self._request, gm=self._reference)
        if _is_compared(eager_forward(after), reference, SharedPasses(), self.bounds):
            self.compared.add(each.name)


def _hold_later(
    request: GraphRequest, shared: SharedPasses, records: tuple[PassRecord, ...], bounds: Bounds
) -> Rewritten:
    """Drop passes of the later stages that change numbers although they declare to keep them.

    The eager fallback with all such passes removed is the reference. The passes are added back one
    at a time, and the eager fallback is compared with the reference after each.
    """
    declared = [
        place
        for place, each in enumerate(shared.passes)
        if each.keeps_numbers and each.stage not in BEFORE_AUTOGRAD
    ]
    dropped = set(declared)
    reference = _without(shared, dropped)
    compared = set(request.compared_passes)
    for place in declared:
        dropped.remove(place)
        added = shared.passes[place]
        fallback, ran = make_fallback(request, _without(shared, dropped))
        if added.name not in changing(ran):
            continue
        try:
            if _is_compared(fallback, request, reference, bounds):
                compared.add(added.name)
        except Refusal as wrong:
            failure = PassError(added.name, "numbers", text_of(wrong))
            if shared.on_error == "raise":
                raise failure from wrong
            dropped.add(place)
            records += (PassRecord(added.name, str(added.stage), error=str(failure)),)
    request = dataclasses.replace(request, compared_passes=frozenset(compared))
    return request, _without(shared, dropped), records


def _without(shared: SharedPasses, places: Set[int]) -> SharedPasses:
    kept = tuple(each for place, each in enumerate(shared.passes) if place not in places)
    return dataclasses.replace(shared, passes=kept)


def _is_compared(
    rewritten: Callable[..., Any], request: GraphRequest, shared: SharedPasses, bounds: Bounds
) -> bool:
    """Return True if all numbers of a rewritten graph were compared with the graph before.

    False if the comparison itself failed, for lack of memory for instance.

    Raises:
        Refusal: the numbers differ.
    """
    try:
        return verify(rewritten, request, shared, bounds, BuildFacts())
    except (Refusal, PassError):
        raise
    except BaseException as error:  # noqa: BLE001  # an error of the comparison, such as lack of memory
        control_flow.pass_on(error)
        return False
