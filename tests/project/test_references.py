"""Docstrings refer to modules, classes and functions that exist."""

from __future__ import annotations

import pkgutil
import re

import pytest
from common import ROOT

ROLE = re.compile(r":(?:mod|func|class|data|meth|attr|exc):`~?(composer(?:\.\w+)*)`")
FILES = sorted((ROOT / "composer").rglob("*.py"))


def exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_references_in_docstrings_lead_to_something() -> None:
    """A name that moved is found here, since nothing imports it."""
    found = {(file.name, name) for file in FILES for name in ROLE.findall(file.read_text())}
    assert len(found) > 100
    assert [each for each in sorted(found) if not exists(each[1])] == []
