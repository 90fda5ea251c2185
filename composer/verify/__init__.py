"""Did a candidate do anything, and is it right?

:mod:`~composer.verify.prove` looks at what a backend returned. :func:`verify` compares what that
computes with what eager computes (:mod:`~composer.verify.answers`), or with the graph in float64
(:mod:`~composer.verify.double`). The other names are the steps of such a comparison, for those who
make it at another time or measure instead.
"""

from __future__ import annotations

from composer.verify.answers import (
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

__all__ = [
    "Run",
    "changeable",
    "exact",
    "generator_state",
    "given_copies",
    "judge",
    "named_outputs",
    "run",
    "strides_of",
    "verify",
]
