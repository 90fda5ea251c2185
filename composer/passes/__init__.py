"""Shared passes: written once, run for every engine, and for the floor.

A pass is a frozen dataclass (:class:`GraphPass`) that edits one graph in place. Policies list
passes by name, by ``"module:Class"``, or as objects; ``docs/writing-a-pass.md`` goes from an empty
file to a package.
"""

from __future__ import annotations

from composer.passes.base import GraphPass, PassResult, Stage
from composer.passes.bisect import Culprit, bisect
from composer.passes.check import PassCheck, check
from composer.passes.function import FunctionPass
from composer.passes.resolve import register

__all__ = [
    "Culprit",
    "FunctionPass",
    "GraphPass",
    "PassCheck",
    "PassResult",
    "Stage",
    "bisect",
    "check",
    "register",
]
