"""``composer.lock``: which engine serves which graph, written down, compared with, held to.

:mod:`~composer.lock.file` is the file, :mod:`~composer.lock.describe` makes a graph's entry,
:mod:`~composer.lock.witness` collects those of a program, :mod:`~composer.lock.difference` names
what is not the same, and :func:`hold` keeps a compile to what the file says.
"""

from __future__ import annotations

from composer.lock.hold import hold

__all__ = ["hold"]
