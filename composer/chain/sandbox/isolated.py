"""The code that runs in a sandbox: try the candidates of a parcel, and measure them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.fx

from composer import _torch
from composer.chain import walk
from composer.chain.eager_fallback import EagerFallback
from composer.chain.sandbox import parcel
from composer.chain.sandbox.decide import MEASURING
from composer.chain.select.benchmark import MOST_BESIDE
from composer.errors import PassError, Refusal, error_line
from composer.knowledge.verdict import deserves_verdict
from composer.records import Attempt, GraphRequest, Outcome, plain

_OF_THE_CALLER: tuple[type[Exception], ...] = (*_torch.dynamo.DYNAMO_CONTROL_FLOW, PassError)
"""Exceptions that belong into the caller's own process, which meets them itself."""


def tried(payload: bytes, ready: Callable[..., None]) -> dict[str, Any]:
    """Walk the chain of a parcel.

    Args:
        payload: The parcel (:func:`composer.chain.sandbox.parcel.pack`).
        ready: Called when the parcel is unpacked, and at each further step.

    Returns:
        The records of the attempts, and the places of the chain that may serve, best first. The
        refusal of a parcel that cannot be unpacked. Or why the walk did not end: what is
        to happen in the caller's own process.
    """
    try:
        contents = parcel.unpack(payload)
    except Refusal as error:
        return {"refused": plain(Attempt("", error.status, error.reason, str(error), 0.0))}
    entries, shared, (gm, sent), facts, settings, surroundings = parcel.opened(contents)
    ready()
    benchmark = settings["benchmark"]
    if settings["beside"]:
        _torch.inductor.compile_in_one_thread()
        if benchmark is not None:
            benchmark = dataclasses.replace(benchmark, most=MOST_BESIDE)

    def step(place: int | None, attempts: Sequence[Attempt]) -> None:
        """Tell the caller what begins now."""
        ready(MEASURING if place is None else place, plain(attempts))

    try:
        with parcel.within(surroundings), _captured(gm, sent) as inputs:
            request = GraphRequest(gm=gm, example_inputs=tuple(inputs), **facts)
            eager = EagerFallback(request, shared)
            outcome = walk.walk(
                request,
                entries,
                eager,
                benchmark,
                strict=settings["strict"],
                in_sandbox=step,
            )
    except _OF_THE_CALLER as error:
        return {"unfinished": error_line(error)}
    return {
        "attempts": plain(outcome.attempts),
        "ranking": _ranking(outcome, len(entries)),
        "lasts": deserves_verdict(outcome),
        "cpu_seconds": sum(os.times()[:4]),
    }


@contextmanager
def _captured(gm: torch.fx.GraphModule, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Compile as within Dynamo's compile; yield the inputs, with the graph's own symbols."""
    fakes = _torch.sources.example_values(gm)
    if any(isinstance(each, _torch.fakes.FakeTensor) for each in fakes):
        with _torch.compiles.recaptured(gm, values):
            yield _torch.symbols.with_symbols(gm, values)
    else:
        with _torch.compiles.as_if_captured(values):
            yield values


def _ranking(outcome: Outcome, places: int) -> list[int]:
    """Return the places that may serve. Behind the first that was accepted, all others may."""
    if outcome.ranking is not None:
        return list(outcome.ranking)
    last = len(outcome.attempts) - 1
    return list(range(last, places)) if outcome.attempts[last].accepted else []
