"""Functions that inspect, copy and compare captured graphs, without engines or policies.

Inspection:

- :mod:`~composer.graphs.capture` reads facts about a graph that Dynamo captured.
- :mod:`~composer.graphs.nodes` reads the value of a node.
- :mod:`~composer.graphs.writes` finds the tensors that a graph may write to.
- :mod:`~composer.graphs.collectives` tells whether a graph waits for other ranks.

Copies and runs:

- :mod:`~composer.graphs.written` serializes a graph as text or for another process.
- :mod:`~composer.graphs.keys` computes the key of a graph from that text.
- :mod:`~composer.graphs.clones` copies a graph and its inputs.
- :mod:`~composer.graphs.checkpoints` runs a graph without an engine.
- :mod:`~composer.graphs.comparison` compares the results of two runs.
"""
