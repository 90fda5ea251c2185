"""Pydantic's errors in the user's terms: where, what, and what would be accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from composer.registry import did_you_mean

Location = tuple[str | int, ...]
"""The place of a value in a file or a table: keys, and indices of lists."""


class Hinting(BaseModel):
    """A table that can suggest what to write instead of some unknown keys."""

    @classmethod
    def hint_for(cls, key: str) -> str:
        """Return a hint what to write instead of an unknown key; empty if there is none."""
        raise NotImplementedError


def mistakes_in(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return each mistake that pydantic found in the input of a class, as a sentence."""
    return [in_words(each, root) for each in error.errors()]


def in_words(error: Any, root: type[BaseModel]) -> str:
    """Return a mistake as a sentence.

    Args:
        error: One of ``ValidationError.errors()``.
        root: The class that was validated.
    """
    *parents, key = error["loc"] or ("",)
    where = path_of(error["loc"])
    if error["type"] == "extra_forbidden":
        table = _table_at(root, parents)
        hint = table.hint_for(str(key)) if issubclass(table, Hinting) else ""
        names = [name for name, field in table.model_fields.items() if not field.exclude]
        hint = f"; {hint}" if hint else did_you_mean(str(key), names)
        return f"unknown option {where!r}{hint} (accepted: {', '.join(names)})"
    if error["type"] == "missing":
        return f"option {where!r} is missing"
    message = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    return f"option {where!r} is {error['input']!r}: {message}" if where else message


def path_of(location: Sequence[str | int]) -> str:
    """Return a location as text, such as ``chain[0].options``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def _table_at(root: type[BaseModel], parents: Sequence[str | int]) -> type[BaseModel]:
    """Return the class of the table that these keys lead to."""
    for key in parents:
        if key in root.model_fields:
            root = next(_models_in(root.model_fields[str(key)].annotation), root)
    return root


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of tables that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)
