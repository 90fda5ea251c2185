"""Pydantic's errors in the user's terms: where, what, and what would be accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from composer.registry import did_you_mean

Location = tuple[str | int, ...]
"""Where something stands in a file, or in a table: keys, and places in lists."""


class Hinting(BaseModel):
    """A table that knows what was meant by some keys that it does not have."""

    @classmethod
    def hint_for(cls, key: str) -> str:
        """What to write instead of an unknown key; empty where nobody knows."""
        raise NotImplementedError


def in_words(error: Any, root: type[BaseModel]) -> str:
    """One mistake as a sentence.

    Args:
        error: One of ``ValidationError.errors()``.
        root: What was validated.
    """
    *parents, key = error["loc"] or ("",)
    where = path_of(error["loc"])
    if error["type"] == "extra_forbidden":
        held = _held(root, parents)
        hint = held.hint_for(str(key)) if issubclass(held, Hinting) else ""
        told = f"; {hint}" if hint else did_you_mean(str(key), held.model_fields)
        return f"unknown option {where!r}{told} (accepted: {', '.join(held.model_fields)})"
    if error["type"] == "missing":
        return f"option {where!r} is missing"
    message = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    return f"option {where!r} is {error['input']!r}: {message}"


def path_of(location: Sequence[str | int]) -> str:
    """``chain[0].options``."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
    return "".join(parts).removeprefix(".")


def _held(root: type[BaseModel], parents: Sequence[str | int]) -> type[BaseModel]:
    """The table in which a key stands."""
    for key in parents:
        if key in root.model_fields:
            root = next(_models_in(root.model_fields[str(key)].annotation), root)
    return root


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The tables that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)
