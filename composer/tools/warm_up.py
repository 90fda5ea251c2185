"""Compiles and measures for example calls, before a program says that it is ready."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from composer import session
from composer.errors import FallbackWarning
from composer.system.warned import warn_once
from composer.telemetry.report import Report
from composer.tools.progress import shown

_log = logging.getLogger("composer")

Call = tuple[Any, ...] | Mapping[str, Any]

_QUIET_ROUNDS = 2
"""After this many rounds in a row that change no record, the calls are warm. One round is not
enough: a selection may begin in one round, in the background, and take over in the next one."""

_MOST_ROUNDS = 20
"""The end for a program that never becomes warm, because some call compiles a graph each time."""


def warm_up(
    compiled: Callable[..., Any], calls: Iterable[Call], *, timeout: float | None = None
) -> Report:
    """Make example calls until all that they need is compiled, measured and in place.

    The calls are made in rounds. After each round composer waits for the selections in the
    background (``select`` with ``background``). The end is reached when two rounds change nothing.
    So each call is made three times at least. The calls are real ones: what ``compiled`` writes or
    draws at a call, it writes or draws here.

    Call it under the grad mode, autocast and device of the later calls, since torch compiles a
    graph for each of them.

    Args:
        compiled: What ``torch.compile`` returned, or a function that calls it.
        calls: The arguments of each call: a tuple of positional arguments, or a mapping of keyword
            arguments. A generator can make them for several sizes. All are kept until the end.
        timeout: The seconds after which to give up. A compile under way is not interrupted.

    Returns:
        The report of the graphs that were compiled meanwhile, in all threads; ``str()`` is a table.

    Raises:
        TimeoutError: it was not done within ``timeout``.
        TypeError: arguments are neither a tuple nor a mapping.
        Exception: whatever a call raises, with a note that has the number of the call.
    """
    listed = list(calls)
    for index, call in enumerate(listed):
        check_call(index, call)
    here = session.current()
    known = session.reports()  # keeps these counters alive, so that no new ones have their id
    noted = here.noted
    answered = _answered_calls()
    deadline = None if timeout is None else time.monotonic() + timeout
    quiet = 0
    with shown():
        for number in range(1, _MOST_ROUNDS + 1):
            before = session.reports()
            _make_round(number, compiled, listed, deadline)
            quiet = quiet + 1 if session.reports() == before else 0
            if quiet == _QUIET_ROUNDS:
                break
    if _answered_calls() == answered:
        text = 'no call of composer.warm_up reached a graph compiled with backend="composer"'
        warn_once(FallbackWarning(text), may_raise=True)
    old = {id(each.runtime) for each in known}
    new = tuple(each for each in session.reports() if id(each.runtime) not in old)
    return Report(new, session.current().without_graph(noted))


def check_call(index: int, call: Any) -> None:
    """Refuse arguments of a call that are neither a tuple nor a mapping.

    Raises:
        TypeError: they are not.
    """
    if not isinstance(call, tuple | Mapping):
        wanted = "a tuple of positional arguments, such as (x,), or a mapping of keyword arguments"
        raise TypeError(f"calls[{index}] is a {type(call).__name__}, and should be {wanted}")


def _answered_calls() -> int:
    return sum(each.runtime.calls for each in session.reports())


def _make_round(
    number: int, compiled: Callable[..., Any], calls: list[Call], deadline: float | None
) -> None:
    """Make each call once, and wait until nothing is built or measured in the background.

    Raises:
        TimeoutError: the deadline has passed.
        Exception: whatever a call raises.
    """
    for place, call in enumerate(calls, 1):
        name = f"call {place} of {len(calls)}"
        if _seconds_until(deadline) == 0:
            raise TimeoutError(f"composer.warm_up: no time is left for {name}, in round {number}")
        started = time.perf_counter()
        try:
            if isinstance(call, tuple):
                compiled(*call)
            else:
                compiled(**call)
        except Exception as error:
            error.add_note(f"composer.warm_up made {name}, in round {number}")
            raise
        seconds = time.perf_counter() - started
        _log.info("warm-up, round %d: %s took %.2f s", number, name, seconds)
    if not session.current().background.settled(_seconds_until(deadline)):
        left = [each for each in session.reports() if each.runtime.under_way]
        doing = (f"graph {each.label} of {each.model} ({each.runtime.under_way})" for each in left)
        raise TimeoutError(f"composer.warm_up: no time is left to choose for {', '.join(doing)}")


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
