"""Work in a sandbox, a child process: a crash, a hang or a lack of memory there does no harm here.

:func:`ask` gives a sandbox bytes and watches it (:mod:`~composer.system.subprocesses.asking`). A
sandbox is never a fork of this process, whose threads would not survive one. A server forks it
(:mod:`~composer.system.subprocesses.serving`). The server has imported what the work needs, and has
started no thread and used no device. This process starts a server with its first question and keeps
it for the next (:mod:`~composer.system.subprocesses.servers`).
"""

from __future__ import annotations

from composer.system.subprocesses.asking import NONE, Limits, Unwanted, ask

__all__ = ["NONE", "Limits", "Unwanted", "ask"]
