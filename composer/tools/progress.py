"""A line on the terminal that says what is being compiled, while a script runs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from composer import session
from composer.telemetry.progress import Step
from composer.telemetry.report import counted

_INTERVAL = 0.2
"""Seconds between two updates of the line."""

_PATIENCE = 1.0
"""Seconds that a step lasts before it is shown."""

_BELOW = "\x1bD\x1bD\x1b[2A\x1b7\x1b[2B\r"
"""Makes room for two lines below the cursor, saves its position, and goes to the second line."""

_BACK = "\x1b8"
_CLEAR = "\x1b[J"
"""Clears from the cursor to the end of the screen, where only the line stands."""


@contextmanager
def shown() -> Iterator[None]:
    """Show composer's current long step on stderr until the block ends, if it is a terminal.

    The line is below the cursor, and the cursor stays where the script left it. So the output of
    the script is not disturbed. (``rich.live`` would have to replace ``sys.stdout`` for that.)
    """
    if not _is_terminal():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_show, args=(sys.stderr.fileno(), over), name="composer-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=1)


def _is_terminal() -> bool:
    try:
        is_terminal = os.isatty(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # replaced, or closed
        return False
    return is_terminal and os.environ.get("TERM", "dumb") != "dumb"


def _show(terminal: int, over: threading.Event) -> None:
    """Update the line until ``over`` is set, or the terminal is gone."""
    drawn = False
    with suppress(OSError):
        while not over.wait(_INTERVAL):
            line = _line(session.current().progress.now())
            if line:
                width = os.get_terminal_size(terminal).columns or 80  # 0: it does not say
                _write(terminal, f"{_CLEAR}{_BELOW}{line[: width - 1]}{_BACK}")
            elif drawn:
                _write(terminal, _CLEAR)
            drawn = bool(line)
        if drawn:
            _write(terminal, _CLEAR)


def _write(terminal: int, text: str) -> None:
    os.write(terminal, text.encode(errors="replace"))


def _line(steps: tuple[Step, ...]) -> str:
    """``"compiling graph 1 of MyModel (290 ops): inductor, 12 s"``; empty with nothing to say."""
    if not steps or steps[0].seconds < _PATIENCE:
        return ""
    step = steps[0]
    model = step.model.rpartition(".")[2]
    what = f"graph {step.number} of {model} ({counted(step.nodes, 'op')}): {step.what}"
    more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
    return f"compiling {what}, {step.seconds:.0f} s{more}"
