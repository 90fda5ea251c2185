"""An engine for each fault, which another process can import by its name: ``faulty:raises``."""

from __future__ import annotations

from composer.testing import FakeBackend, Fault

globals().update({str(fault): FakeBackend(fault, name=str(fault)) for fault in Fault})
