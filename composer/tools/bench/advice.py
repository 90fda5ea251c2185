"""The policy that follows from a ranking: the quickest right engine first, in a file's words."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import tomli_w

from composer.chain import select
from composer.chain.candidates import entries_of
from composer.errors import first_line
from composer.policy import found, sources
from composer.records import printable
from composer.tools.bench.ranking import EAGER, Ranking, Standing

_HAS_TO_BE_NAMED = "COMPOSER_CONFIG or composer.configure has to name this file"
"""composer.policy.found refuses some settings in a file that it only found."""


def obstacle(ranking: Ranking) -> str:
    """Return why no policy follows: no engine with right numbers was measured. Empty if one was."""
    if any(each.is_usable for each in ranking.candidates):
        return ""
    if not any(each.graphs or each.refusals for each in ranking.standings):
        return f"torch.compile captured no graph of {ranking.model} that an engine could run"
    refused = [_refused(each, ranking) for each in ranking.candidates]
    why = "; ".join(refused) or "none is here"
    return f"no engine could be measured: {why}"


def policy_of(ranking: Ranking, matches: Sequence[str] = ()) -> dict[str, Any]:
    """Return a policy book, as a table, with a rule for each name that the model's graphs have.

    The chain has the candidates that were right and not surely slower than eager, the quickest
    first. ``select`` is ``"first"`` where that one was surely ahead on the whole model. It is
    ``"fastest"`` where two, or one and eager, were too close to tell, where graphs of the model
    want different engines, and where the figures leave a :attr:`~Ranking.doubt`.

    Args:
        ranking: What was measured.
        matches: Globs for these names; by default the names themselves.
    """
    good = sorted(_good(ranking), key=attrgetter("ms"))
    device = ranking.device.partition(":")[0]
    chain = [_spelled(each) for each in good] or [EAGER]
    select_by = "first" if _is_clear(good, ranking) else "fastest"
    rules = []
    for name in matches or ranking.models:
        match = {"model": name, "device": device, "training": ranking.training}
        rules.append({"match": match, "chain": chain, "select": select_by})
    return {"version": 1, "models": rules}


def text_of(ranking: Ranking, matches: Sequence[str] = (), measured: str = "") -> str:
    """Return the policy as TOML, with comments that say what it follows from.

    Args:
        ranking: What was measured, without an :func:`obstacle`.
        matches: As for :func:`policy_of`.
        measured: When, where, on what; for the first line.
    """
    policy = policy_of(ranking, matches)
    head = f": {measured}" if measured else ""
    lines = [f"Measured by `composer bench`{head}.", *_comments(ranking)]
    for setting in found.for_the_user_to_say(sources.read(policy), Path.cwd()):
        lines.append(f"{_HAS_TO_BE_NAMED}: it would {setting}.")
    comments = "".join(f"# {printable(line)}\n" for line in lines)
    text = f"{comments}{tomli_w.dumps(policy)}"
    written = sources.read(tomllib.loads(text))
    for rule in written.models:  # the file can be read, and its names be resolved
        entries_of(rule)
    return text


def _good(ranking: Ranking) -> list[Standing]:
    return [each for each in ranking.candidates if not _objection(each, ranking)]


def _objection(each: Standing, ranking: Ranking) -> str:
    """Return why a candidate is left out; empty if it is kept.

    With doubtful figures, no candidate is left out for being slow.
    """
    if not each.is_usable:
        why = " | ".join(first_line(refusal) for refusal in each.refusals)
        return why or "took no graph"
    if not ranking.doubt and ranking.eager.is_surely_ahead_of(each, select.TIE):
        return f"slower than eager: {each.ms:.3g} ms a call"
    return ""


def _refused(each: Standing, ranking: Ranking) -> str:
    why = _objection(each, ranking)
    if why.startswith(each.label):
        return why
    return f"{each.label}: {why}"


def _is_clear(good: list[Standing], ranking: Ranking) -> bool:
    """Return True if the first candidate, or eager if there is none, is surely the fastest."""
    if ranking.doubt or len(ranking.composer.engines) > 1:
        return False
    if not good:
        return True
    first = good[0]
    if not _is_sure(first, ranking.eager):
        return False
    return len(good) == 1 or first.is_surely_ahead_of(good[1], select.TIE)


def _is_sure(each: Standing, eager: Standing) -> bool:
    """Return True if it is known to be no slower than eager; a tie goes to the engine."""
    return each.is_surely_ahead_of(eager, 1 / select.TIE)


def _spelled(each: Standing) -> str | dict[str, Any]:
    assert each.candidate is not None
    name = each.candidate.name
    settings: dict[str, Any] = each.candidate.model_dump(exclude_defaults=True, exclude={"backend"})
    return {"backend": name, **settings} if settings else name


def _comments(ranking: Ranking) -> Iterator[str]:
    good = _good(ranking)
    if not good:
        yield "No engine is faster than eager here: leave torch.compile out."
    elif not any(_is_sure(each, ranking.eager) for each in good):
        yield "Undecided whether an engine is faster than eager: each process measures for itself."
    if ranking.doubt:
        yield ranking.doubt
    if ranking.eager.ms is not None:
        yield f"{EAGER}: {ranking.eager.ms:.3g} ms a call"
    for each in ranking.candidates:
        objection = _objection(each, ranking)
        if objection:
            yield f"left out: {each.label}: {objection}"
        elif _is_sure(each, ranking.eager):
            yield _times(each, ranking)
        else:
            yield f"{_times(each, ranking)}; undecided"
    if ranking.composer.ms is not None:
        yield _times(ranking.composer, ranking)


def _times(each: Standing, ranking: Ranking) -> str:
    times = f"{each.label}: {each.ms:.3g} ms a call"
    ratio = each.over(ranking.eager)
    if ratio is not None:
        times += f", {ratio} times as fast as eager"
    return times
