"""Finds settings of a policy file that are not mistakes but have no effect here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

from composer import backends
from composer.chain.candidates import entries_of
from composer.errors import OptionError
from composer.knowledge.shared_store import SharedStore
from composer.policy import AUTO, DYNAMO, Match, Policy, names_code
from composer.policy.model import Layer, PolicyBook, Rule
from composer.policy.resolution import merge
from composer.registry import did_you_mean

_MEANT = {"gpu": "cuda", "fp64": "float64", "fp32": "float32", "fp16": "float16"}
_MEANT |= {"bf16": "bfloat16", "double": "float64", "float": "float32", "half": "float16"}

_MEASURED = {"fastest"}
_COMPARED = {"compile", "sample"}

_NEEDS = {
    ("select", "seconds"): ("by", _MEASURED),
    ("select", "objective"): ("by", _MEASURED),
    ("select", "calls"): ("objective", {"amortised"}),
    ("verify", "every"): ("when", {"sample"}),
    ("verify", "rtol"): ("when", _COMPARED),
    ("verify", "atol"): ("when", _COMPARED),
    ("precision", "max_error"): ("mode", {"bf16", "int8", "auto"}),
    ("precision", "allow"): ("mode", {"auto"}),
    ("on_runtime_error", "retry_after"): ("action", {"fallback"}),
}
"""For a key of a field's table: the other key, and its values with which the first has effect."""


def notes(book: PolicyBook) -> Iterator[str]:
    """Yield a sentence for each setting without effect, and for each name unknown here."""
    for name in book.backends:
        yield from _of_engine(f"backends.{name}", name)
    if book.cache.store:
        try:
            SharedStore(book.cache.store).check()
        except OptionError as trouble:
            yield f"cache: {trouble}"
    tables = (book.defaults, *book.models)
    names = ["defaults", *(f"models[{index}]" for index in range(len(book.models)))]
    for where, policy in zip(names, tables, strict=True):
        yield from _of_policy(where, policy)
        yield from _idle(where, policy, tables)
        yield from _unlimited(where, policy, tables)


def _idle(where: str, policy: Policy, tables: Sequence[Policy]) -> Iterator[str]:
    """Yield keys that need a value of another key that no table sets.

    All tables are looked at, because several may hold for one graph.
    """
    for (field, key), (other, values) in _NEEDS.items():
        if key not in getattr(policy, field).model_fields_set:
            continue
        found = {attrgetter(f"{field}.{other}")(table) for table in tables}
        if field == "verify" and any(map(_chooses, tables)):
            found.add("compile")  # by default
        if found.isdisjoint(values):
            wanted = " or ".join(f"{other} = {value!r}" for value in sorted(values))
            yield f"{where}.{field}: {key} says nothing without {wanted}"


def _chooses(table: Policy) -> bool:
    """Return True if composer is to choose the engine."""
    return table.select.by == "fastest" or any(each.name == AUTO for each in table.chain)


def _unlimited(where: str, policy: Policy, tables: Sequence[Policy]) -> Iterator[str]:
    """Yield candidates whose ``memory_limit`` has no effect, as no child process builds them."""
    has_limit = policy.memory_limit or any(each.memory_limit for each in policy.chain)
    if not has_limit or any(table.isolate for table in tables):
        return
    merged = merge((Layer("defaults", tables[0]), Layer(where, policy)))
    here = [each for each in entries_of(merged) if not (each.limits.isolate or each.is_fallback)]
    names = [each.candidate.name for each in here if each.limits.memory]
    if names:
        which = ", ".join(dict.fromkeys(names))
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
    if not names_code(name) and name.removeprefix(DYNAMO) not in known:
        yield f"{where}: no engine is called {name!r} here"


def _of_match(where: str, match: Match) -> Iterator[str]:
    device = (match.device or "").partition(":")[0]
    if not _is_device(device):
        yield from _unless_glob(where, "device", device, _DEVICES)
    if match.dtype not in _DTYPES:
        yield from _unless_glob(where, "dtype", match.dtype or "", _DTYPES)


def _unless_glob(where: str, what: str, word: str, known: set[str]) -> Iterator[str]:
    """Yield a note that nothing has this name, unless it is empty or has wildcards."""
    if word and set("*?[").isdisjoint(word):
        meant = f"; {_MEANT[word]}?" if word in _MEANT else did_you_mean(word, known)
        yield f"{where}: no {what} is called {word!r}{meant}"


_DEVICES = {"cpu", "cuda", "mps", "xpu"}
_DTYPES = {
    str(each).removeprefix("torch.")
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}


def _is_device(kind: str) -> bool:
    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True
