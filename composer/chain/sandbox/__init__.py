"""``isolate = true``: a candidate is first built in a sandbox, a child process.

:func:`trial_build` (:mod:`~composer.chain.sandbox.caller`) sends a parcel
(:mod:`~composer.chain.sandbox.parcel`) to a sandbox, where :mod:`~composer.chain.sandbox.isolated`
makes the attempt. :mod:`composer.system.subprocesses` starts, limits and ends sandboxes. Some
engines start child processes by the same package.
"""

from __future__ import annotations

from composer.chain.sandbox.caller import trial_build

__all__ = ["trial_build"]
