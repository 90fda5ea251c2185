"""Finds settings of a policy file that are not mistakes but have no effect here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from composer import backends
from composer.chain.candidates import entries_of
from composer.chain.select.shared_store import SharedStore
from composer.config import PolicyBook, Rule
from composer.errors import OptionError
from composer.layers import Layer, merge
from composer.policy import AUTO, Match, Policy
from composer.registry import did_you_mean

_MEANT = {"gpu": "cuda", "fp64": "float64", "fp32": "float32", "fp16": "float16"}
_MEANT |= {"bf16": "bfloat16", "double": "float64", "float": "float32", "half": "float16"}

_MEASURED = {"fastest"}
_COMPARED = {"compile", "sample"}

_NEEDS = {
    ("select", "seconds"): ("by", _MEASURED),
    ("select", "background"): ("by", _MEASURED),
    ("select", "objective"): ("by", _MEASURED),
    ("select", "calls"): ("objective", {"amortised"}),
    ("select", "within"): ("objective", {"memory"}),
    ("verify", "every"): ("when", {"sample"}),
    ("verify", "rtol"): ("when", _COMPARED),
    ("verify", "atol"): ("when", _COMPARED),
    ("precision", "max_error"): ("mode", {"bf16", "auto"}),
    ("on_runtime_error", "retry_after"): ("action", {"fallback"}),
}
"""For a key of a field's table: the other key, and its values with which the first has effect."""


def notes(found: PolicyBook) -> Iterator[str]:
    """Yield a sentence for each setting without effect, and for each name unknown here."""
    for name in found.backends:
        yield from _of_engine(f"backends.{name}", name)
    if found.cache.store:
        try:
            SharedStore(found.cache.store).check()
        except OptionError as trouble:
            yield f"cache: {trouble}"
    tables = {"defaults": found.defaults}
    tables |= {f"models[{index}]": rule for index, rule in enumerate(found.models)}
    for where, policy in tables.items():
        yield from _of_policy(where, policy)
    for where, policy in tables.items():
        yield from _idle(where, policy, list(tables.values()))
        yield from _unlimited(where, policy, found.defaults, list(tables.values()))


def _idle(where: str, policy: Policy, tables: Sequence[Policy]) -> Iterator[str]:
    """Yield keys that need a value of another key that no table sets.

    All tables are looked at, because several may hold for one graph.
    """
    for (field, key), (other, values) in _NEEDS.items():
        given = getattr(policy, field)
        if key in given.model_fields_set and not any(
            getattr(getattr(each, field), other) in values for each in tables
        ):
            wanted = " or ".join(f"{other} = {value!r}" for value in sorted(values))
            yield f"{where}.{field}: {key} says nothing without {wanted}"


def _unlimited(
    where: str, policy: Policy, defaults: Policy, tables: Sequence[Policy]
) -> Iterator[str]:
    """Yield candidates whose ``memory_limit`` has no effect, as no child process builds them."""
    asked = policy.memory_limit or any(each.memory_limit for each in policy.chain)
    if not asked or any(each.isolate for each in tables):
        return
    merged = merge((Layer("defaults", defaults), Layer(where, policy)), {}).policy
    free = [
        each.candidate.name
        for each in entries_of(merged)
        if each.limits.memory and not (each.limits.isolate or each.backend.may_return_original)
    ]
    if free:
        which = ", ".join(dict.fromkeys(free))
        yield f"{where}: memory_limit says nothing of {which} without isolate = true"


def _of_policy(where: str, policy: Policy) -> Iterator[str]:
    if isinstance(policy, Rule):
        yield from _of_match(f"{where}.match", policy.match)
    if "chain" in policy.model_fields_set:
        for each in policy.chain:
            yield from _of_engine(f"{where}.chain", each.name)
            yield from _of_match(f"{where}.chain: when", each.when or Match())


def _of_engine(where: str, name: str) -> Iterator[str]:
    known = {*backends.names(), AUTO}
    if not backends.names_code(name) and name.removeprefix(backends.DYNAMO) not in known:
        yield f"{where}: no engine is called {name!r} here"


def _of_match(where: str, match: Match) -> Iterator[str]:
    kind = (match.device or "").partition(":")[0]
    if _is_word(kind) and not _is_device(kind):
        yield f"{where}: no device is called {kind!r}{_meant(kind, _DEVICES)}"
    dtypes = {str(each).removeprefix("torch.") for each in vars(torch).values() if _is_dtype(each)}
    if match.dtype is not None and _is_word(match.dtype) and match.dtype not in dtypes:
        yield f"{where}: no dtype is called {match.dtype!r}{_meant(match.dtype, dtypes)}"


_DEVICES = {"cpu", "cuda", "mps", "xpu"}


def _meant(word: str, known: set[str]) -> str:
    return f"; {_MEANT[word]}?" if word in _MEANT else did_you_mean(word, known)


def _is_word(glob: str) -> bool:
    """Return True if a glob is not empty and has no wildcards."""
    return bool(glob) and not any(sign in glob for sign in "*?[")


def _is_device(kind: str) -> bool:
    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True


def _is_dtype(each: object) -> bool:
    return isinstance(each, torch.dtype)
