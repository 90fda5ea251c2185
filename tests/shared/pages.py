"""What the pages of the documentation say: their sections, their code, their names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from common import ROOT

FENCE = re.compile(r"^```([^\s`]*)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)


NOT_RUN = re.compile(r"<!-- not run: \S.*-->\s*\Z")


def python_blocks(text: str) -> Iterator[str]:
    """The code of every ``python`` block, moved down to the line it has in the page.

    A block right behind the comment ``<!-- not run: reason -->`` is left out.
    """
    for block in FENCE.finditer(text):
        if block[1] == "python" and not NOT_RUN.search(text[: block.start()]):
            yield "\n" * text.count("\n", 0, block.start(2)) + block[2]


def sections(page: str) -> dict[str, str]:
    """Heading to text of the ``##`` sections of a page of docs/; a second one is an error."""
    parts = re.split(r"^## (.+)$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    headings = parts[1::2]
    assert len(headings) == len(set(headings))
    return dict(zip(headings, parts[2::2], strict=True))


def not_named(page: str, *names: str) -> list[str]:
    """Those of ``names`` that a page of docs/ never mentions as code."""
    text = (ROOT / "docs" / page).read_text()
    return [name for name in names if f"`{name}`" not in text]
