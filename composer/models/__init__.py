"""Whole models, measured: how fast each engine runs one, and the policy that follows.

:mod:`~composer.models.workload` finds what makes a model, :mod:`~composer.models.subject` is a
model and one call of it, :mod:`~composer.models.ranking` measures, and
:mod:`~composer.models.advice` says which policy follows from that.
"""
