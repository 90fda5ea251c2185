"""``composer.lock``: a file that says which engine serves which graph.

- :mod:`~composer.chain.lock.file` reads and writes the file;
- :mod:`~composer.chain.lock.describe` makes the entry of a graph;
- :mod:`~composer.chain.lock.witness` collects the entries of a program;
- :mod:`~composer.chain.lock.difference` names the differences between two locks;
- :func:`hold` restricts a compile to the engine that the file names.
"""

from __future__ import annotations

from composer.chain.lock.hold import hold

__all__ = ["hold"]
