"""Read an engine's options into a pydantic model; one error names all mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from composer.errors import OptionError
from composer.policy.wording import mistakes_in

M = TypeVar("M", bound=BaseModel)


def read_options(model: type[M], options: Mapping[str, Any], backend: str) -> M:
    """The candidate's options as the engine's settings.

    Raises:
        OptionError: an option is unknown or malformed. The message names all of them.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        mistakes = "; ".join(mistakes_in(error, model))
        raise OptionError(f"backend {backend!r}: {mistakes}") from error
