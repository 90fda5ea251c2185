"""The environment's word on which engines are tried."""

from __future__ import annotations

from composer import config
from composer.cli.fail import USAGE, fail
from composer.errors import OptionError


def refuse_switches(why: str) -> None:
    """End where the environment says which engines are tried, whatever the policy says."""
    try:
        switch = config.switch_on_call()
    except OptionError as mistake:
        fail(str(mistake), USAGE)
    if switch:
        fail(f"{switch} is set, and {why}; unset it", USAGE)
