"""Shared passes: written once, run for every engine, and for the eager fallback.

A pass is an object of a subclass of :class:`GraphPass`; it edits one graph in place. Policies list
passes by name, by ``"module:Class"``, or as objects; ``docs/how-to/write-a-pass.md`` goes from an
empty file to a package.

:mod:`~composer.passes.base` says what a pass is. Three kinds make one easy to write:
:mod:`~composer.passes.pattern` (which finds places by :mod:`~composer.passes.matching`),
:mod:`~composer.passes.interpreter` (a :mod:`~composer.passes.walk` over the graph) and
:mod:`~composer.passes.function`. :mod:`~composer.passes.resolve` reads the policy's list, and has
the table of the passes that ship, a module each. :mod:`~composer.passes.early` and
:mod:`~composer.passes.late` run the stages, before and within a candidate, through the
:mod:`~composer.passes.pipeline`, which holds every pass to the :mod:`~composer.passes.rules` and
rolls back by a :mod:`~composer.passes.snapshot`. What a rewrite has to know of a graph is in
:mod:`~composer.passes.aliasing`, :mod:`~composer.passes.gradients`,
:mod:`~composer.passes.metadata`, :mod:`~composer.passes.modes`, :mod:`~composer.passes.order` and
:mod:`~composer.passes.purity`; :mod:`composer.passes.debug` shows what passes do.
"""

from __future__ import annotations

from composer.passes.base import GraphPass, PassResult
from composer.passes.debug.bisect import Culprit, bisect
from composer.passes.debug.check import PassCheck, check
from composer.passes.function import FunctionPass
from composer.passes.interpreter import InterpreterPass, Value
from composer.passes.matching import NearMiss
from composer.passes.pattern import PatternPass
from composer.passes.resolve import register
from composer.records import Stage

__all__ = [
    "Culprit",
    "FunctionPass",
    "GraphPass",
    "InterpreterPass",
    "NearMiss",
    "PassCheck",
    "PassResult",
    "PatternPass",
    "Stage",
    "Value",
    "bisect",
    "check",
    "register",
]
