"""The code does not become denser or larger unnoticed."""

from __future__ import annotations

import sys

import pytest
from common import ROOT

MOST_DECISIONS = 37.0
"""For 100 lines of function bodies. The aim is 32."""


def test_decisions_do_not_become_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python bench/density.py`` says where they stand."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    import density

    assert density.density(sorted(density.PACKAGE.rglob("*.py"))) <= MOST_DECISIONS
