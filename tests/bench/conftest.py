"""What the tests of ``bench`` share."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
from common import ROOT


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of ``bench``, as its scripts do."""
    monkeypatch.syspath_prepend(ROOT / "bench")

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load
