"""What is known about a candidate for a graph: one fingerprint, and facts that depend on its parts.

- :mod:`~composer.knowledge.fingerprint`: all that a fact may depend on, in named parts;
- :mod:`~composer.knowledge.facts`: what a kind of fact has, and where facts are looked up and kept;
- :mod:`~composer.knowledge.failure`: a candidate failed, at a cost;
- :mod:`~composer.knowledge.verdict`: the engine that was measured to be the fastest;
- :mod:`~composer.knowledge.self_test`: whether an engine works with the installed versions;
- :mod:`~composer.knowledge.quarantine`: a candidate failed when it ran;
- :mod:`~composer.knowledge.part`: the products that a candidate keeps in float32;
- :mod:`~composer.knowledge.chosen`: the candidate that serves a graph, as ``composer.lock`` has it;
- :mod:`~composer.knowledge.lock_file`: the file ``composer.lock``, an export of these facts;
- :mod:`~composer.knowledge.shared_store`: a folder through which machines share facts.
"""
