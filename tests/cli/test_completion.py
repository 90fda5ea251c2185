"""Shell completion of the command ``composer``."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from composer.cli import app


@pytest.mark.parametrize(
    ("words", "found"),
    [("composer ru", "run"), ("composer lock --ch", "--check"), ("composer policy ch", "check")],
)
def test_words_are_completed(words: str, found: str) -> None:
    """Commands that are imported only when they are run are completed as well."""
    asked = {"_COMPOSER_COMPLETE": "complete_bash", "COMP_WORDS": words}
    asked["COMP_CWORD"] = str(len(words.split()) - 1)
    done = CliRunner().invoke(app, [], prog_name="composer", env=asked)
    assert done.output.split() == [found]
