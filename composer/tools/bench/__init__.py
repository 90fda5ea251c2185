"""Whole models, measured: how fast each engine runs one, and the policy that follows.

:mod:`~composer.tools.bench.workload` finds what makes a model, :mod:`~composer.tools.bench.subject`
is a model and one call of it, :mod:`~composer.tools.bench.ranking` measures, and
:mod:`~composer.tools.bench.advice` says which policy follows from that.
"""
