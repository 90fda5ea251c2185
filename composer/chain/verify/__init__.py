"""Did a candidate do anything, and is it right?

:mod:`~composer.chain.verify.prove` looks at what a backend returned: is it more than the captured
graph? And at what that returns when it is called: can the graph's outputs be taken out of it?
:func:`verify` (:mod:`~composer.chain.verify.answers`) compares the candidate's numbers with
eager's, and in doubt with the graph in float64 (:mod:`~composer.chain.verify.double`).
:func:`rewrite` (:mod:`~composer.chain.verify.rewrites`) runs the shared passes and holds them to
eager's numbers where they declare to keep them. The other names are the steps of that comparison,
which :mod:`composer.runtime.sampling` and :mod:`composer.chain.select.timer` also use.
"""

from __future__ import annotations

from composer.chain.verify.answers import (
    WROTE_TO_WEIGHTS,
    Run,
    changeable,
    exact,
    generator_state,
    given_copies,
    judge,
    named_outputs,
    run,
    strides_of,
    verify,
)
from composer.chain.verify.prove import outputs_of
from composer.chain.verify.rewrites import rewrite

__all__ = [
    "WROTE_TO_WEIGHTS",
    "Run",
    "changeable",
    "exact",
    "generator_state",
    "given_copies",
    "judge",
    "named_outputs",
    "outputs_of",
    "rewrite",
    "run",
    "strides_of",
    "verify",
]
