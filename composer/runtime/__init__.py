"""The run time of a compiled graph: what happens at its calls, and when its engine fails.

Read in this order:

- :mod:`~composer.runtime.calls`: :func:`watch`, the code around every call;
- :mod:`~composer.runtime.served`: which engine serves the graph now, and the change to another;
- :mod:`~composer.runtime.roles`: the records that those two work with;
- :mod:`~composer.runtime.succession`: the rest of the chain, for when an engine fails;
- :mod:`~composer.runtime.background`: ``select_async``, which measures the other candidates in the
  thread of :mod:`composer.system.background`, between two calls (:mod:`~composer.runtime.barrier`).

Smaller subjects: :mod:`~composer.runtime.versions` tells whether an engine wrote to its inputs,
:mod:`~composer.runtime.schedule` which calls are special, :mod:`~composer.runtime.sampling`
compares every N-th call with eager, and :mod:`~composer.runtime.backward` guards compiled
backwards.
"""

from __future__ import annotations

from composer.runtime.calls import watch

__all__ = ["watch"]
