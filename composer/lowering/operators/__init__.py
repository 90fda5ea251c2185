"""Operators written out while a graph is made functional, where ONNX does not say what eager does.

:mod:`~composer.lowering.operators.table` puts the entries together for AOTAutograd; the other
modules have them, by subject. :mod:`~composer.lowering.operators.fusions` goes the other way:
it makes one operator of ONNX Runtime's own of what ONNX says in many.
"""

from __future__ import annotations

from composer.lowering.operators.table import Table, decompositions

__all__ = ["Table", "decompositions"]
