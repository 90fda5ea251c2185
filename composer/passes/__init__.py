"""Shared passes: written once, run for every engine, and for the floor.

A pass is a frozen dataclass (:class:`GraphPass`) that edits one graph in place. Policies list
passes by name, by ``"module:Class"``, or as objects; ``docs/writing-a-pass.md`` goes from an empty
file to a package.
"""

from __future__ import annotations

from composer.passes.base import GraphPass, PassResult, Stage
from composer.passes.debug.bisect import Culprit, bisect
from composer.passes.debug.check import PassCheck, check
from composer.passes.function import FunctionPass
from composer.passes.interpreter import InterpreterPass, Value
from composer.passes.matching import NearMiss
from composer.passes.pattern import PatternPass
from composer.passes.resolve import register

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
