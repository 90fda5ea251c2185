"""Waits for the background work of composer."""

from __future__ import annotations

from composer import session


def settle(timeout: float = 60.0) -> None:
    """Wait until nothing is built or measured in the background (``select`` with ``background``).

    Args:
        timeout: Seconds to wait at most.

    Raises:
        TimeoutError: background work is not finished by then.
    """
    if not session.current().background.settled(timeout):
        raise TimeoutError(f"something was still built or measured after {timeout:g} s")
