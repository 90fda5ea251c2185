"""The candidates of a graph, from the names in a policy to the one that serves.

Read in this order:

- :mod:`~composer.chain.candidates` finds the engine behind each name of the policy;
- :mod:`~composer.chain.walk` tries one candidate after the other;
- :mod:`~composer.chain.attempt` is one try: probe, build, proof of work, comparison with eager;
- :mod:`~composer.chain.select` chooses among those that were accepted;
- :mod:`~composer.chain.eager_fallback` serves where none was.

An attempt may also build in a child process (:mod:`~composer.chain.sandbox`), compare numbers
(:mod:`~composer.chain.verify`), compute in low precision (:mod:`~composer.chain.precision`,
:mod:`~composer.chain.mixed_precision`), and know of the test of an engine
(:mod:`~composer.chain.selftest`). Among several ranks the chain is walked by their leader first
(:mod:`~composer.chain.ranks`).
:mod:`~composer.chain.lock` reads and writes ``composer.lock``.
"""
