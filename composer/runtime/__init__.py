"""The run time of a compiled graph: what happens at its calls, and when its engine fails.

Read in this order:

- :mod:`~composer.runtime.calls`: :func:`~composer.runtime.calls.watch`, the code around every call;
- :mod:`~composer.runtime.slot`: which engine serves the graph now: the states, and the table of
  what follows from each event;
- :mod:`~composer.runtime.answers`: the calls that are not ordinary, or at which the engine fails;
- :mod:`~composer.runtime.succession`: the candidates of the graph, built for the slot and recorded;
- :mod:`~composer.runtime.background`: ``select`` with ``background``, which measures the other
  candidates in the thread of :mod:`composer.system.background`, between two calls
  (:mod:`~composer.system.barrier`).

Smaller subjects: :mod:`~composer.runtime.versions` tells whether an engine wrote to its inputs,
:mod:`~composer.runtime.special_calls` which calls are special, :mod:`~composer.runtime.sampling`
compares every N-th call with eager, and :mod:`~composer.runtime.backward` guards compiled
backwards.
"""
