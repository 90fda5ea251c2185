"""Warnings that a process gives once."""

from __future__ import annotations

import logging
import sys
import sysconfig
import traceback
import warnings

from composer import _torch

log = logging.getLogger("composer")

_MACHINERY = {"composer", "torch", "contextlib", "functools"}

_INSTALLED = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Where files lie that are not the user's: Python's own, and those of installed packages."""

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

    It names the line of the user's code: the first frame outside of installed packages, or else
    the first one outside of torch and composer. Code that Dynamo has compiled has no such line: its
    frame stands at its ``def``. There the line is that of the call of the compiled function.

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
    outside: list[int] = []
    for level, (frame, _) in enumerate(traceback.walk_stack(sys._getframe(1)), 1):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in _MACHINERY or _torch.dynamo.is_generated(frame.f_code):
            continue
        outside.append(level)
        if not frame.f_code.co_filename.startswith(_INSTALLED):
            return level
    return outside[0] if outside else 1
