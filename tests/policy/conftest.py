"""An empty folder for each test of policies."""

from __future__ import annotations

import pytest

import composer


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """No file and no switch of the machine's."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "CHAIN", "STRICT", "DISABLE"):
        monkeypatch.delenv(f"COMPOSER_{name}", raising=False)
    yield
    composer.configure(None)
