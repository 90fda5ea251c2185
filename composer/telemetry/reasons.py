"""Explains each reason code, with the text of the page docs/reference/reasons.md.

``reasons.md`` in this folder is a link to that page, so that an installed composer has it as well.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from composer.records import Reason

_SECTION = re.compile(r"^## `(\w+)`$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_PART = re.compile(r"^\*\*(Means|See more|Do)\.\*\* ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Explained:
    """The explanation of one reason code, in Markdown: its meaning, where to look, what to do."""

    means: str
    see_more: str
    do: str

    @property
    def summary(self) -> str:
        """The first sentence of the meaning, as plain text, without the list of statuses."""
        text = re.sub(r"\s+", " ", self.means.partition("\n\n")[0])
        text = _LINK.sub(r"\1", text)
        sentences = re.split(r"(?<=[.:]) ", text)
        first = next((each for each in sentences if not each.startswith("`")), text)
        return first.replace("`", "").rstrip(":")


def explained(reason: Reason) -> Explained:
    """Return the explanation of a reason.

    Raises:
        KeyError: The page does not have the reason, or one of its three parts is missing.
    """
    return _page()[reason]


@functools.cache
def _page() -> Mapping[str, Explained]:
    text = files("composer.telemetry").joinpath("reasons.md").read_text(encoding="utf-8")
    page = {}
    for code, section in _sections(_SECTION, text).items():
        parts = _sections(_PART, section)
        page[code] = Explained(parts["Means"], parts["See more"], parts["Do"])
    return page


def _sections(heading: re.Pattern[str], text: str) -> Mapping[str, str]:
    """Return the text below each heading, by the name in the heading."""
    pieces = heading.split(text)
    return {name: body.strip() for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}
