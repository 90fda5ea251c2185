"""The reasons, explained: by the page of the documentation, which is in the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import composer
from composer import Reason
from composer.cli import app
from composer.telemetry.reasons import explained

runner = CliRunner()


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained(reason: Reason) -> None:
    """What it means, how to see more, what to do; and one plain sentence of the first."""
    found = explained(reason)
    assert found.means
    assert found.see_more
    assert found.do
    assert len(found.summary) > 30
    assert "\n" not in found.summary
    assert not set("`*") & set(found.summary)


def test_page_in_the_package_is_the_one_in_docs() -> None:
    """One source: a link."""
    package = Path(composer.__file__).parent
    page = package / "telemetry" / "reasons.md"
    assert page.resolve() == (package.parent / "docs" / "reference" / "reasons.md").resolve()


def test_summary_leaves_out_statuses_and_links() -> None:
    """The first sentence that says what happened."""
    assert explained(Reason.TIMEOUT).summary == (
        "The candidate compiled longer than the policy's timeout."
    )


def test_command_lists_every_code() -> None:
    """With a sentence each; as JSON with all three parts."""
    shown = runner.invoke(app, ["reasons"])
    assert shown.exit_code == 0
    assert all(reason.value in shown.output for reason in Reason)
    rows = json.loads(runner.invoke(app, ["reasons", "--json"]).output)
    assert [row["code"] for row in rows] == list(Reason)
    assert set(rows[0]) == {"code", "means", "see_more", "do"}


def test_command_explains_one_code() -> None:
    """Markdown, rendered; the text itself as JSON."""
    shown = runner.invoke(app, ["reasons", "no_device"]).output
    assert "See more. The message says" in " ".join(shown.split())
    assert "**" not in shown
    read = json.loads(runner.invoke(app, ["reasons", "no_device", "--json"]).output)
    assert read["do"] == explained(Reason.NO_DEVICE).do


def test_command_names_the_nearest_code() -> None:
    """A slip is an error, and the exit code says so."""
    result = runner.invoke(app, ["reasons", "low_coverag"])
    assert result.exit_code == 2
    assert "unknown reason 'low_coverag'; did you mean 'low_coverage'?" in result.output
