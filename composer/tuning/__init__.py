"""``composer tune``: verdicts for many models, before anybody waits for them.

A plan (:mod:`~composer.tuning.plan`) becomes jobs; a job is done in a process of its own
(:mod:`~composer.tuning.work`), on this machine or on each type of machine of a Ray cluster
(:mod:`~composer.tuning.cluster`).
"""

from __future__ import annotations

from composer.tuning.plan import Job, read_jobs
from composer.tuning.work import perform, this_machine

__all__ = ["Job", "perform", "read_jobs", "this_machine"]
