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
    parts = _SECTION.split(text)
    return {name: _taken_apart(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _taken_apart(body: str) -> Explained:
    pieces = _PART.split(body)
    parts = {name: text.strip() for name, text in zip(pieces[1::2], pieces[2::2], strict=True)}
    return Explained(parts["Means"], parts["See more"], parts["Do"])
