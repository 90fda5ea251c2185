"""Refuses switches of the environment that choose the engines."""

from __future__ import annotations

from composer import config
from composer.cli.fail import USAGE, fail
from composer.errors import OptionError


def refuse_switches(why: str) -> None:
    """End the command if the environment overrides the policy's engines."""
    try:
        switch = config.switch_on_call()
    except OptionError as mistake:
        fail(str(mistake), USAGE)
    if switch:
        fail(f"{switch} is set, and {why}; unset it", USAGE)
