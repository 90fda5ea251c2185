"""The switches of the environment, which override what the program and its files ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from composer import _torch
from composer.errors import OptionError
from composer.policy.model import Layer, Policy, read_policy
from composer.policy.tables import Cache, Select
from composer.registry import names_in

CHOOSING = ("COMPOSER_CHAIN", "COMPOSER_SELECT", "COMPOSER_DISABLE")
"""The switches that override the engines of all policies."""

_ON, _OFF = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


def switches() -> Iterator[Layer]:
    """Yield the switches of the environment, as layers that override the program's settings.

    Torch's minifier is one of them: it sees only errors that reach it.
    """
    names = _names_in_chain_variable()
    if names:
        yield Layer("COMPOSER_CHAIN", read_policy({"chain": names, "locked": False}))
    word = os.environ.get("COMPOSER_SELECT")
    if word:
        yield Layer("COMPOSER_SELECT", _select_policy(word))
    if "COMPOSER_STRICT" in os.environ:
        yield Layer("COMPOSER_STRICT", read_policy({"strict": is_on("COMPOSER_STRICT")}))
    looks_for = _torch.minifier.minifier_looks_for()
    if looks_for:
        verify = {"verify": "off"} if looks_for == "wrong numbers" else {}
        yield Layer("minifier", read_policy({"on_runtime_error": "raise", **verify}))
    if is_on("COMPOSER_DISABLE"):
        yield disabled_layer()


def switched(cache: Cache) -> Cache:
    """Return the settings of what is kept on disk, with those that the environment overrides.

    While torch's minifier looks for failures, every candidate is tried.
    """
    changes: dict[str, Any] = {}
    store = os.environ.get("COMPOSER_VERDICT_STORE")
    if store:
        changes["store"] = store
    if _torch.minifier.minifier_looks_for():
        changes["failures"] = 0.0
    return cache.model_copy(update=changes)


def _select_policy(word: str) -> Policy:
    try:
        return read_policy({"select": word, "locked": False})
    except OptionError:
        words = " or ".join(Select.words())
        raise OptionError(f"COMPOSER_SELECT is {word!r}, and should be {words}") from None


def disabled_layer() -> Layer:
    """Return the layer of ``COMPOSER_DISABLE``, under which the captured graph runs as it is."""
    select = {"by": "first", "background": False}
    fields = {"chain": ["eager"], "select": select, "passes": [], "locked": False}
    return Layer("COMPOSER_DISABLE", read_policy(fields))


def is_disabled() -> bool:
    """Return True if ``COMPOSER_DISABLE`` is on. A malformed value counts as off."""
    return os.environ.get("COMPOSER_DISABLE", "").strip().lower() in _ON


def _names_in_chain_variable() -> list[str]:
    """Return the names in ``COMPOSER_CHAIN``.

    Raises:
        OptionError: the variable is written as a list of Python or TOML.
    """
    chain = os.environ.get("COMPOSER_CHAIN", "")
    if not {*chain}.isdisjoint("[]{}\"'"):
        raise OptionError(f"COMPOSER_CHAIN is names with commas between, as in a,b, not {chain!r}")
    return names_in(chain)


def switch_on_call() -> str:
    """Return the variable that overrides the engines of all policies; empty if none is set.

    Raises:
        OptionError: a switch is malformed.
    """
    names = [each.name for each in switches() if each.name in CHOOSING]
    return names[-1] if names else ""


def is_on(switch: str) -> bool:
    """Return True if a switch of the environment is on.

    Raises:
        OptionError: its value is neither a word for on nor for off.
    """
    value = os.environ.get(switch, "").strip().lower()
    if value not in _ON | _OFF:
        accepted = f"on: {', '.join(sorted(_ON))}; off: {', '.join(sorted(_OFF - {''}))}, empty"
        raise OptionError(f"{switch} is {value!r} ({accepted})")
    return value in _ON
