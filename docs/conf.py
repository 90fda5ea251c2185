"""Sphinx: how the site is made of these pages. ``make docs`` builds it."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "composer"
author = copyright = "the authors of composer"  # Sphinx reads this name
release = version = version_of("torch-compile-composer")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"composer {release}"
exclude_patterns = ["_build"]

myst_heading_anchors = 4
"""Links to headings work as they do on GitHub, down to this depth."""
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
nitpicky = False


def keep_colons(*arguments: Any) -> None:
    """Napoleon takes what stands before a colon in an attribute's first line for its type."""
    lines: list[str] = arguments[-1]
    kept = [line.removeprefix(":type: ") for line in lines if line.startswith(":type: ")]
    if kept:
        text = [line for line in lines if not line.startswith(":type: ")]
        lines[:] = [f"{kept[0]}: {text[0].strip()}", *map(str.strip, text[1:])]


def setup(app: Sphinx) -> None:
    """Sphinx calls this; the handler runs after Napoleon's."""
    app.connect("autodoc-process-docstring", keep_colons, priority=600)
