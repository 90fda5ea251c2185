"""The name that composer is installed by, and packages that would take its folder."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from common import ROOT, compiled
from typer.testing import CliRunner

from composer.cli import app
from composer.errors import FallbackWarning
from composer.system import distribution


@pytest.fixture
def mosaicml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package that installs a folder ``composer/``, as its metadata say."""
    metadata = tmp_path / "mosaicml-0.32.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mosaicml\nVersion: 0.32.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    cached = distribution.conflict, distribution.version_of
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def test_no_other_package_takes_the_folder_here() -> None:
    """Nothing is said where there is nothing to say."""
    assert distribution.conflict() == ""


@pytest.mark.usefixtures("mosaicml")
def test_package_with_a_folder_of_the_same_name_is_named_at_the_first_compile() -> None:
    """The warning names it and the command that puts things right."""
    with pytest.warns(FallbackWarning, match="mosaicml") as caught:
        compiled(torch.relu, "eager")(torch.ones(2))
    assert "pip uninstall mosaicml; pip install" in str(caught[0].message)
    assert "torch-compile-composer" in str(caught[0].message)


@pytest.mark.usefixtures("mosaicml")
def test_doctor_names_a_package_with_a_folder_of_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Below its table. No engine is tried here."""
    untried = {"status": "unavailable", "reason": "missing_dependency", "message": "not tried"}
    row = dict.fromkeys(("inference", "training"), untried)
    monkeypatch.setattr("composer.cli.doctor._attempts", lambda name, request: row)
    said = " ".join(CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "500"}).output.split())
    assert "the package mosaicml is installed here" in said


def test_verified_versions_begin_with_the_lower_bounds_and_are_documented() -> None:
    """What pip may install is what was tested, and the page says the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(each for extra in extras for each in extra)]
    page = (ROOT / "docs/reference/versions.md").read_text()
    for name, (oldest, newest) in distribution.VERIFIED.items():
        if name != "python":
            assert any(each.startswith(f"{name}>={oldest}") for each in asked), name
        between = ", " if name == "python" else " to "  # nothing ran with 3.12
        said = oldest if oldest == newest else f"{oldest}{between}{newest}"
        assert f"| {name} | {said} |" in page.replace("| Python |", "| python |")
