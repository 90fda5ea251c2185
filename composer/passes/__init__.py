"""Shared passes: graph rewrites that are written once and run for every engine and for eager.

A pass is an object of a subclass of :class:`GraphPass`. It edits one graph in place. A policy lists
passes by name, by ``"module:Class"``, or as objects. ``docs/how-to/write-a-pass.md`` is a tutorial.

Writing a pass: :mod:`~composer.passes.base` defines the interface. Three base classes make a pass
shorter: :mod:`~composer.passes.pattern` (it finds matches with :mod:`~composer.passes.matching`),
:mod:`~composer.passes.interpreter` and :mod:`~composer.passes.function`.

Running passes: :mod:`~composer.passes.resolve` reads the policy's list, and has the table of
composer's own passes, which have one module each. :mod:`~composer.passes.before_autograd` runs the
stages before all candidates, and :mod:`~composer.passes.within_aotautograd` those within a
candidate. Both use the :mod:`~composer.passes.pipeline`. It checks the
:mod:`~composer.passes.invariants` after every pass, and rolls a failed pass back with a
:mod:`~composer.passes.snapshot`.

Facts about a graph that a rewrite needs are in :mod:`~composer.passes.aliasing`,
:mod:`~composer.passes.gradients`, :mod:`~composer.passes.metadata`,
:mod:`~composer.passes.node_modes`, :mod:`~composer.passes.order` and
:mod:`~composer.passes.purity`.
:mod:`composer.passes.debug` shows what passes do.
"""

from __future__ import annotations

from composer.passes.base import GraphPass, PassResult
from composer.passes.debug.bisect import Culprit, bisect
from composer.passes.debug.check import PassCheck, check
from composer.passes.function import FunctionPass
from composer.passes.interpreter import InterpreterPass, Value
from composer.passes.pattern import PatternPass
from composer.passes.resolve import register
from composer.passes.unmatched import NearMiss
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
