"""Warnings that a process gives once."""

from __future__ import annotations

import logging
import sys
import warnings

log = logging.getLogger("composer")

_given: set[tuple[type[Warning], str]] = set()
"""The classes and subjects of the warnings given. Python forgets its own record of them whenever
torch sets a filter."""


def warn_once(
    warning: Warning,
    *,
    about: str = "",
    may_raise: bool = False,
    cause: BaseException | None = None,
) -> None:
    """Log and give a warning, unless one of its class and subject was given before.

    It names the line of the user's code: the first frame outside of torch and composer.

    Args:
        warning: The warning, with its text.
        about: The subject, if the text may differ each time; by default the text.
        may_raise: True raises the warning where warnings are errors, each time.
        cause: The error whose traceback the log has.
    """
    subject = type(warning), about or str(warning)
    if subject in _given:
        return
    _given.add(subject)
    log.warning("%s", warning, exc_info=cause)
    try:
        warnings.warn(warning, stacklevel=_users_stacklevel())
    except type(warning):
        if may_raise:
            _given.discard(subject)
            raise


def forget_warnings() -> None:
    """Give all warnings again."""
    _given.clear()


def _users_stacklevel() -> int:
    """Return the stack level of the user's code for the caller of this function."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_globals.get("__name__", "")):
        level += 1
        frame = frame.f_back
    return level


def _is_machinery(module: str) -> bool:
    return module.partition(".")[0] in {"composer", "torch", "contextlib", "functools"}
