"""A graph that is served: what goes on at its calls, and what follows when its engine fails.

:func:`watch` (:mod:`~composer.guard.calls`) is around every call. What it knows of the graph stands
in :mod:`~composer.guard.standby`; :mod:`~composer.guard.versions` tells whether an engine wrote to
what it was given, and :mod:`~composer.guard.schedule` which calls are special.
:mod:`~composer.guard.backward` answers for compiled backwards, :mod:`~composer.guard.sampling`
compares a call every so often, and :mod:`~composer.guard.gate` lets something be done between two
calls.

:mod:`~composer.guard.succession` finds the next engine in the chain, and
:mod:`~composer.guard.overtaking` a faster one beside the calls, in the thread of
:mod:`~composer.guard.background`.
"""

from __future__ import annotations

from composer.guard.calls import watch

__all__ = ["watch"]
