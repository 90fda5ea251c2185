"""``composer tune``: finds verdicts for many models ahead of their use.

A plan (:mod:`~composer.tools.tune.plan`) becomes jobs; a job is done in a process of its own
(:mod:`~composer.tools.tune.work`), on this machine or on each type of machine of a Ray cluster
(:mod:`~composer.tools.tune.cluster`).
"""

from __future__ import annotations

from composer.tools.tune.plan import Job, read_jobs
from composer.tools.tune.work import perform, this_machine

__all__ = ["Job", "perform", "read_jobs", "this_machine"]
