"""``composer.lock`` and a compile: the engine that the file names, or who serves to be written.

- :func:`hold` restricts a compile to the engine that the file names;
- :mod:`~composer.chain.lock.observed` collects who serves the graphs of a program;
- :mod:`~composer.chain.lock.difference` names the differences between a program and the file.

The file and its entries are in :mod:`composer.knowledge`.
"""

from __future__ import annotations

from composer.chain.lock.hold import hold

__all__ = ["hold"]
