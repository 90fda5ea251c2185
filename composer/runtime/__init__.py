"""The run time of a compiled graph: what happens at its calls, and when its engine fails.

Read in this order:

- :mod:`~composer.runtime.calls`: :func:`~composer.runtime.calls.watch`, the code around every call;
- :mod:`~composer.runtime.served`: the served graph: its engine, its state, its answers to calls
  that are not ordinary or at which the engine fails;
- :mod:`~composer.runtime.table`: the states, and what follows from each event;
- :mod:`~composer.runtime.successors`: the candidates of the graph, built after its compile;
- :mod:`~composer.runtime.graph_record`: the record of the graph, as it changes;
- :mod:`~composer.runtime.ranges`: ``select`` with ``ranges``: several served graphs, each for a
  range of sizes;
- :mod:`~composer.runtime.background`: ``select`` with ``background``: eager answers until a sandbox
  has chosen.

Smaller subjects: :mod:`~composer.runtime.versions` tells whether an engine wrote to its inputs,
:mod:`~composer.runtime.sampling` compares every N-th call with eager, and
:mod:`~composer.runtime.backward` guards compiled backwards.
"""
