"""``isolate = true``: a candidate is first built in a sandbox, a child process.

:func:`trial_build` (:mod:`~composer.isolate.caller`) sends a parcel
(:mod:`~composer.isolate.parcel`) to a sandbox, where :mod:`~composer.isolate.isolated` makes the
attempt. :mod:`composer.child` starts, limits and ends sandboxes. Engines use it as well.
"""

from __future__ import annotations

from composer.isolate.caller import trial_build

__all__ = ["trial_build"]
