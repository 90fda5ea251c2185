"""What every test of the lock gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import composer


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, no switch of the machine's, and what a script leaves behind undone."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "CHAIN", "STRICT", "DISABLE"):
        monkeypatch.delenv(f"COMPOSER_{name}", raising=False)
    for name in ("argv", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield
    composer.configure(None)
