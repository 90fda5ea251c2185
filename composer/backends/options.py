"""Read an engine's options into a pydantic model; one error names all mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from composer.errors import OptionError
from composer.registry import did_you_mean

M = TypeVar("M", bound=BaseModel)


def read_options(model: type[M], options: Mapping[str, Any], backend: str) -> M:
    """The candidate's options as the engine's settings.

    Raises:
        OptionError: an option is unknown or malformed. The message names all of them.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        known = tuple(model.model_fields)
        mistakes = "; ".join(_explain(each, known) for each in error.errors())
        raise OptionError(f"backend {backend!r}: {mistakes}") from error


def _explain(error: Any, known: tuple[str, ...]) -> str:
    """The text for one pydantic error, in the words of the other backends."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return (
            f"unknown option {where!r}{did_you_mean(where, known)} (accepted: {', '.join(known)})"
        )
    message = error["msg"].removeprefix("Value error, ")
    return f"{where} is {error['input']!r}: {message}" if where else message
