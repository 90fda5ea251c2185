"""The code does not become denser or larger unnoticed."""

from __future__ import annotations

import sys

import pytest
from common import ROOT

MOST_DECISIONS = 37.24
"""For 100 lines of function bodies. The aim is 32."""


MOST_LINES = 57_692
"""In the ``*.py`` files of composer."""


def test_lines_do_not_become_more() -> None:
    """The number only ever goes down, by hand."""
    files = (ROOT / "composer").rglob("*.py")
    lines = sum(each.read_text().count("\n") for each in files)
    more = lines - MOST_LINES
    assert more <= 0, (
        f"composer/ has {lines:,} lines, {more:,} more than MOST_LINES: take a concept out that is "
        "not needed any more, or shorten what you added. If the lines are worth it, a person who "
        "reviews the change raises the number, and the commit says why."
    )


def test_decisions_do_not_become_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python bench/density.py`` says where they stand."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    import density

    assert density.density(sorted(density.PACKAGE.rglob("*.py"))) <= MOST_DECISIONS
