"""The documentation can be read: pages are short, and so are the sentences of those read first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from common import ROOT
from pages import FENCE

pytestmark = pytest.mark.docs

LONGEST_PAGE = 250  # lines
LONGEST_SENTENCE = 18  # words, in the mean of a page
LONG_PAGES = {
    "benchmarks/ten-public-models.md",  # tables that a program writes
    "reference/policy.md",  # one table of all fields
    "reference/reasons.md",  # packaged as one file, a section for each reason
}

PAGES = sorted((ROOT / "docs").rglob("*.md"))
READ_FIRST = sorted([ROOT / "README.md", *(ROOT / "docs" / "how-to").glob("*.md")])

SKIPPED = re.compile(r"<!--.*?-->|<[^>]+>", re.DOTALL)
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
NO_PROSE = re.compile(r"\s*(#|\||>|\[!\[)")
BULLET = re.compile(r"\s*([-*]|\d+\.)\s+")
END = re.compile(r"(?<=[.!?])[\"*)]*\s+")


def paragraphs(text: str) -> Iterator[str]:
    """The prose of a page: no code blocks, tables, headings or quotes; a bullet by itself."""
    current: list[str] = []
    for line in [*SKIPPED.sub("", FENCE.sub("", text)).splitlines(), ""]:
        begins = BULLET.match(line)
        if current and (begins or not line.strip() or NO_PROSE.match(line)):
            yield " ".join(current)
            current = []
        if line.strip() and not NO_PROSE.match(line):
            current.append(line[begins.end() if begins else 0 :].strip())


def sentence_lengths(text: str) -> list[int]:
    """The words of each sentence; a link counts by its text, code as one word."""
    prose = (LINK.sub(r"\1", CODE.sub("code", each)) for each in paragraphs(text))
    sentences = (each for paragraph in prose for each in END.split(paragraph))
    return [words for each in sentences if (words := len(re.findall(r"\w[\w'/.-]*", each)))]


def test_words_of_sentences_are_counted_outside_of_code_and_tables() -> None:
    """On a page with one of each."""
    page = (
        "# A heading here\n\nOne two `a b c`. Four [five six](to.md#x) seven\neight!\n\n"
        "| a | table |\n|---|---|\n\n```python\nx = 1  # no prose. At all.\n```\n\n"
        "- **Bold.** A bullet\n  in two lines\n- another one\n"
    )
    assert sentence_lengths(page) == [3, 5, 1, 5, 2]


def test_pages_are_short() -> None:
    """But for those named above, which are looked up and not read."""
    lines = {str(page.relative_to(ROOT / "docs")): page.read_text().count("\n") for page in PAGES}
    assert [page for page in lines if lines[page] > LONGEST_PAGE and page not in LONG_PAGES] == []
    assert LONG_PAGES - {page for page in lines if lines[page] > LONGEST_PAGE} == set()


@pytest.mark.parametrize("page", READ_FIRST, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    """In the mean of the README, and of each page that answers a question."""
    assert mean(sentence_lengths(page.read_text())) <= LONGEST_SENTENCE
