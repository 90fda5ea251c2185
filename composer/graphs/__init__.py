"""A captured graph, looked at and copied: nothing here knows of an engine or of a policy.

:mod:`~composer.graphs.capture` reads what Dynamo handed over, :mod:`~composer.graphs.nodes` what a
node stands for. :mod:`~composer.graphs.written` writes a graph down, as text or for another
process, and :mod:`~composer.graphs.keys` makes of that the key that a graph is known by.
:mod:`~composer.graphs.writes` finds what a graph may write to (of norms only
:mod:`~composer.graphs.norms` tells), :mod:`~composer.graphs.modes` whether it sets modes of
torch's, and :mod:`~composer.graphs.collectives` whether it waits for other ranks.
:mod:`~composer.graphs.clones` copies a graph and its inputs,
:mod:`~composer.graphs.checkpoints` runs one without an engine, and
:mod:`~composer.graphs.comparison` compares what two runs of it gave.
"""
