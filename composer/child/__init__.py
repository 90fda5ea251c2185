"""Work in a child process: what crashes, hangs or eats memory there does not do so here.

:func:`ask` gives a child bytes and watches it (:mod:`~composer.child.asking`). Children are never
forks of this process, whose threads would not survive one. A server forks them, which has imported
what the work needs, and started no thread and no device. This process starts it with its first
question, and hands it requests (:mod:`~composer.child.forkserver`); what it and its children do is
in :mod:`~composer.child.serving`.
"""

from __future__ import annotations

from composer.child.asking import NONE, Limits, ask

__all__ = ["NONE", "Limits", "ask"]
