"""Checks that a candidate did some work, and that its numbers are right.

:mod:`~composer.chain.verify.prove` checks that a backend returned more than the captured graph,
and that a call of it returns a tuple or list of outputs.
:func:`verify` (:mod:`~composer.chain.verify.against_eager`) runs the candidate and eager once each
(:mod:`~composer.chain.verify.runs`), and compares their numbers. If they differ, it compares with
the graph in float64 (:mod:`~composer.chain.verify.double`).
:func:`rewrite` (:mod:`~composer.chain.verify.rewrites`) runs the shared passes. It compares a pass
with eager if the pass declares that it keeps numbers. :mod:`~composer.chain.verify.trained` looks
for gradients where nothing is compared. The other names are the steps of these comparisons;
:mod:`composer.runtime.sampling` and :mod:`composer.chain.select.timer` use them too.
"""

from __future__ import annotations

from composer.chain.verify.against_eager import WROTE_TO_WEIGHTS, exact, judge, obstacle, verify
from composer.chain.verify.prove import outputs_of
from composer.chain.verify.rewrites import rewrite
from composer.chain.verify.runs import (
    Run,
    changeable,
    copy_for_run,
    generator_state,
    named_outputs,
    run,
    strides_of,
)

__all__ = [
    "WROTE_TO_WEIGHTS",
    "Run",
    "changeable",
    "exact",
    "generator_state",
    "copy_for_run",
    "judge",
    "named_outputs",
    "obstacle",
    "outputs_of",
    "rewrite",
    "run",
    "strides_of",
    "verify",
]
