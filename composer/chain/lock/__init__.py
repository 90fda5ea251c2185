"""``composer.lock``: which engine serves which graph, written down, compared with, held to.

:mod:`~composer.chain.lock.file` is the file, :mod:`~composer.chain.lock.describe` makes a graph's
entry, :mod:`~composer.chain.lock.witness` collects those of a program,
:mod:`~composer.chain.lock.difference` names what is not the same, and :func:`hold` keeps a compile
to what the file says.
"""

from __future__ import annotations

from composer.chain.lock.hold import hold

__all__ = ["hold"]
