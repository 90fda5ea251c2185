"""Did a candidate do anything, and is it right?

:mod:`~composer.verify.prove` looks at what a backend returned: is it more than the captured graph?
And at what that returns when it is called: can the graph's outputs be taken out of it?
:func:`verify` (:mod:`~composer.verify.answers`) compares the candidate's numbers with eager's, and
in doubt with the graph in float64 (:mod:`~composer.verify.double`). :func:`rewrite`
(:mod:`~composer.verify.rewrites`) runs the shared passes and holds them to eager's numbers where
they declare to keep them. The other names are the steps of that comparison, which
:mod:`composer.runtime.sampling` and :mod:`composer.select.timer` also use.
"""

from __future__ import annotations

from composer.verify.answers import (
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
from composer.verify.prove import outputs_of
from composer.verify.rewrites import rewrite

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
