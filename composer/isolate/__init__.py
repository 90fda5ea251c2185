"""``isolate = true``: a candidate is tried in a child process first.

:func:`rehearse` (:mod:`~composer.isolate.caller`) sends a parcel
(:mod:`~composer.isolate.parcel`) to a child process, where :mod:`~composer.isolate.isolated` makes
the attempt. How a child is started, limited and ended is :mod:`composer.child`'s, which engines
use as well.
"""

from __future__ import annotations

from composer.isolate.caller import rehearse

__all__ = ["rehearse"]
