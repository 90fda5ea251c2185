"""Warnings that a process gives once."""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress

log = logging.getLogger("composer")

_given: set[tuple[type[Warning], str]] = set()
"""The classes and subjects of the warnings given. Python forgets its own record of them whenever
torch sets a filter."""


def warn_once(warning: Warning, *, about: str = "") -> None:
    """Log and give a warning, unless one of its class and subject was given before.

    The warning is never raised, even where warnings are errors.

    Args:
        warning: The warning, with its text.
        about: The subject, if the text may differ each time; by default the text.
    """
    subject = type(warning), about or str(warning)
    if subject in _given:
        return
    _given.add(subject)
    log.warning("%s", warning)
    with suppress(type(warning)):
        warnings.warn(warning, stacklevel=3)


def forget_warnings() -> None:
    """Give all warnings again."""
    _given.clear()
