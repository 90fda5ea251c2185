"""Options of an engine, read into a model of pydantic's: all mistakes named in one error."""

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
        OptionError: naming every option that is unknown or malformed.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        known = tuple(model.model_fields)
        mistakes = "; ".join(_explain(each, known) for each in error.errors())
        raise OptionError(f"backend {backend!r}: {mistakes}") from error


def _explain(error: Any, known: tuple[str, ...]) -> str:
    """One of pydantic's errors, as the other backends would say it."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return (
            f"unknown option {where!r}{did_you_mean(where, known)} (accepted: {', '.join(known)})"
        )
    message = error["msg"].removeprefix("Value error, ")
    return f"{where} is {error['input']!r}: {message}" if where else message
