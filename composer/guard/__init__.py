"""The run time of a compiled graph: what happens at its calls, and when its engine fails.

Read in this order:

- :mod:`~composer.guard.calls`: :func:`watch`, the code around every call;
- :mod:`~composer.guard.served`: which engine serves the graph now, and the change to another;
- :mod:`~composer.guard.roles`: the records that those two work with;
- :mod:`~composer.guard.succession`: the rest of the chain, for when an engine fails;
- :mod:`~composer.guard.overtaking`: ``select_async``, which measures the other candidates in the
  thread of :mod:`composer.system.background`, between two calls (:mod:`~composer.gate`).

Smaller subjects: :mod:`~composer.guard.versions` tells whether an engine wrote to its inputs,
:mod:`~composer.guard.schedule` which calls are special, :mod:`~composer.guard.sampling` compares
every N-th call with eager, and :mod:`~composer.guard.backward` guards compiled backwards.
"""

from __future__ import annotations

from composer.guard.calls import watch

__all__ = ["watch"]
