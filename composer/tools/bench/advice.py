"""The policy that follows from a ranking: the quickest right engine first, in a file's words."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from composer import config
from composer.chain import select
from composer.chain.candidates import entries_of
from composer.errors import first_line
from composer.records import printable
from composer.tools.bench.ranking import EAGER, Ranking, Standing


def obstacle(ranking: Ranking) -> str:
    """Return why no policy follows: no engine with right numbers was measured. Empty if one was."""
    if any(each.latency is not None and not each.wrong for each in ranking.candidates):
        return ""
    if not any(each.graphs or each.refusals for each in ranking.standings):
        return f"torch.compile captured no graph of {ranking.model} that an engine could run"
    refused = [_refused(each, ranking) for each in ranking.candidates]
    return f"no engine could be measured: {'; '.join(refused) or 'none is here'}"


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
    good = sorted(_good(ranking), key=_latency)
    graphs = {"device": ranking.device.partition(":")[0], "training": ranking.training}
    rule = {
        "chain": [_spelled(each) for each in good] or [EAGER],
        "select": "first" if _is_clear(good, ranking) else "fastest",
    }
    names = matches or ranking.models
    return {"version": 1, "models": [{"match": {"model": n, **graphs}, **rule} for n in names]}


def text_of(ranking: Ranking, matches: Sequence[str] = (), measured: str = "") -> str:
    """The policy as TOML, with comments that say what it follows from.

    Args:
        ranking: What was measured, without an :func:`obstacle`.
        matches: As for :func:`policy_of`.
        measured: When, where, on what; for the first line.
    """
    policy = policy_of(ranking, matches)
    found = config.read(policy)
    said = [f"Measured by `composer bench`{': ' if measured else ''}{measured}.", *_said(ranking)]
    said += [_found_only(each) for each in config.for_the_user_to_say(found, Path.cwd())]
    comments = "".join(f"# {printable(line)}\n" for line in said)
    text = f"{comments}{tomli_w.dumps(policy)}"
    for rule in config.read(
        tomllib.loads(text)
    ).models:  # what is written can be read, and resolved
        entries_of(rule)
    return text


def _found_only(asked: str) -> str:
    """Return a comment on a setting that :mod:`composer.config` refuses in a file only found."""
    return f"COMPOSER_CONFIG or composer.configure has to name this file: it would {asked}."


def _latency(each: Standing) -> float:
    """Return the seconds of a call of an engine that was measured."""
    assert each.latency is not None
    return each.latency


def _good(ranking: Ranking) -> Iterator[Standing]:
    for each in ranking.candidates:
        if not _objection(each, ranking):
            yield each


def _objection(each: Standing, ranking: Ranking) -> str:
    """Return why a candidate is left out; empty if it is kept.

    With doubtful figures, no candidate is left out for being slow.
    """
    if each.wrong or each.latency is None:
        why = " | ".join(first_line(refusal) for refusal in each.refusals)
        return why or "took no graph"
    if not ranking.doubt and ranking.eager.is_surely_ahead_of(each, select.TIE):
        return f"slower than eager: {_ms(each)} a call"
    return ""


def _refused(each: Standing, ranking: Ranking) -> str:
    why = _objection(each, ranking)
    return why if why.startswith(each.label) else f"{each.label}: {why}"


def _is_clear(good: list[Standing], ranking: Ranking) -> bool:
    if ranking.doubt or len(ranking.composer.engines) > 1:
        return False
    if not good:
        return True
    first, *others = good
    return _is_sure(first, ranking.eager) and all(
        first.is_surely_ahead_of(each, select.TIE) for each in others[:1]
    )


def _is_sure(each: Standing, eager: Standing) -> bool:
    """Return True if it is known to be no slower than eager; a tie goes to the engine."""
    return each.is_surely_ahead_of(eager, 1 / select.TIE)


def _spelled(each: Standing) -> str | dict[str, Any]:
    assert each.candidate is not None
    given = each.candidate.model_dump(exclude_defaults=True) | {"backend": each.candidate.name}
    return each.candidate.name if given.keys() == {"backend"} else given


def _said(ranking: Ranking) -> Iterator[str]:
    good = list(_good(ranking))
    if not good:
        yield "No engine is faster than eager here: leave torch.compile out."
    elif not any(_is_sure(each, ranking.eager) for each in good):
        yield "Undecided whether an engine is faster than eager: each process measures for itself."
    if ranking.doubt:
        yield ranking.doubt
    for each in ranking.standings:
        objection = _objection(each, ranking) if each.candidate else ""
        if objection:
            yield f"left out: {each.label}: {objection}"
        elif each.latency is not None:
            sure = each.candidate is None or _is_sure(each, ranking.eager)
            undecided = "" if sure else "; undecided"
            yield f"{each.label}: {_ms(each)} a call{_speed(each, ranking.eager)}{undecided}"


def _speed(each: Standing, eager: Standing) -> str:
    found = each.over(eager) if each.label != EAGER else None
    if found is None:
        return ""
    return f", {found} times as fast as eager"


def _ms(each: Standing) -> str:
    return f"{_latency(each) * 1e3:.3g} ms"
