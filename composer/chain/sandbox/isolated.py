"""The code that runs in a sandbox: make one attempt, and run the result once."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

from composer import _torch
from composer.chain import selftest, verify
from composer.chain.attempt import try_candidate
from composer.chain.candidates import entries_of
from composer.chain.eager_fallback import make_fallback
from composer.chain.sandbox import parcel
from composer.errors import ComposerError, Refusal, first_line, text_of
from composer.graphs import capture
from composer.passes.resolve import SharedPasses
from composer.passes.within_aotautograd import LatePasses
from composer.policy import Cache, Candidate, Policy
from composer.records import Attempt, GraphRequest, Reason, Status, plain
from composer.system import control_flow


def attempt(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """Make the attempt that a parcel describes, and return its record.

    Args:
        payload: The parcel (:func:`composer.chain.sandbox.parcel.pack`).
        ready: Called when the parcel is unpacked; the limits count from then on.
    """
    return dict(plain(_attempt(payload, ready)))


def _attempt(payload: bytes, ready: Callable[[], None]) -> Attempt:
    try:
        contents = parcel.unpack(payload)
    except Refusal as error:
        return Attempt("", error.status, error.reason, str(error), 0.0)
    backend, options, shared, (gm, sent), around = contents.values()
    ready()
    least = around["min_coverage"]
    candidate = Candidate(backend=backend, options=options, min_coverage=least)
    alone = Policy(
        chain=(candidate,),
        precision=around["precision"],
        freeze=around["freeze"],
    )
    try:
        (entry,) = entries_of(alone, Cache(failures=0.0, artefacts=0.0))
    except ComposerError as error:
        message = f"in a child process: {error}"
        return Attempt("", Status.DECLINED, Reason.NOT_ISOLATABLE, message, 0.0)
    with parcel.within(around["torch"]):
        inputs = parcel.opened(sent)
        request = capture.read_request(gm, inputs, mode=around["mode"])
        with _torch.compiles.as_if_captured(inputs):
            tried = try_candidate(
                request, entry, LatePasses(shared), require_working=selftest.require
            )
        if tried.compiled is None:
            return tried.attempt
        return _run(tried.compiled, request, tried.attempt, shared)


def _run(
    compiled: Callable[..., Any], request: GraphRequest, attempt: Attempt, shared: SharedPasses
) -> Attempt:
    """Run the result once, with a backward in training, and return the attempt's record.

    The weights have made-up values, so eager may raise as well. Then the error does not count.
    """
    try:
        verify.run(compiled, request.example_inputs, request)
    except BaseException as error:  # noqa: BLE001  # becomes a record in the caller
        control_flow.pass_on(error)
        if _fallback_raises(request, shared):
            return attempt
        message = f"raised when it was run on the first inputs: {first_line(text_of(error))}"
        return dataclasses.replace(
            attempt,
            status=Status.FAILED,
            reason=Reason.RAISED_AT_RUNTIME,
            message=message,
            error_type=type(error).__name__,
            traceback="".join(traceback.format_exception(error)),
        )
    return attempt


def _fallback_raises(request: GraphRequest, shared: SharedPasses) -> bool:
    try:
        with _torch.compiles.as_if_captured(request.example_inputs):
            fallback, _ = make_fallback(request, shared)
        verify.run(fallback, request.example_inputs, request)
    except BaseException as error:  # noqa: BLE001  # that it raises is the answer
        control_flow.pass_on(error)
        return True
    return False
