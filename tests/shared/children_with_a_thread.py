"""Work whose imports start a thread, which is in no fork."""

from __future__ import annotations

import threading

from children import look_around

__all__ = ["look_around"]

threading.Thread(target=threading.Event().wait, daemon=True).start()
