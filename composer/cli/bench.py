"""``composer bench``: which engine is the fastest that is right for a model of yours."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from composer import session
from composer.chain.candidates import ONLY_TABLES
from composer.cli.process import cache, refuse_switches, stdout_to_stderr
from composer.cli.script import show
from composer.cli.usage import USAGE, Json, Remember, fail, fail_on, refuse_folder
from composer.errors import MISTAKES, ComposerError
from composer.policy import Facts
from composer.policy.resolution import resolve
from composer.records import printable
from composer.registry import names_in
from composer.telemetry.report import cell, counted
from composer.tools.bench import advice
from composer.tools.bench.ranking import Ranking, Standing, rank
from composer.tools.bench.workload import Workload
from composer.tools.progress import shown

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="A function that returns (module, inputs) or (module, args, kwargs); MODULE is a "
        "module's name or a script's path.",
    ),
]
Chain = Annotated[
    str | None,
    typer.Option(
        help="Engines, as onnxrt,inductor, or as in a file; by default all that are here."
    ),
]
Training = Annotated[
    bool | None,
    typer.Option(
        "--training/--inference", help="By default, whether the module is in training mode."
    ),
]
Seconds = Annotated[float, typer.Option(min=0.1, help="For timing; builds are not counted.")]
Write = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the policy there.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite that file.")]


def bench(
    target: Target,
    chain: Chain = None,
    training: Training = None,
    seconds: Seconds = 10.0,
    write: Write = None,
    force: Force = False,
    remember: Remember = False,
    as_json: Json = False,
) -> None:
    """Time eager, each engine and composer on a model, and say which policy follows."""
    if not math.isfinite(seconds):
        fail(f"--seconds is {seconds}: say how many", USAGE)
    candidates = _chain(chain)
    refuse_switches("would stand for every candidate")
    if write is not None:
        refuse_folder(write)
        if write.exists() and not force:
            fail(f"{write} exists; --force overwrites it", USAGE)
    with fail_on(ComposerError, code=1), fail_on(*MISTAKES):
        workload = Workload(target)
        with stdout_to_stderr() if as_json else nullcontext():
            ranking = _ranked(workload, candidates, training, seconds, remember=remember)
        trouble = advice.obstacle(ranking)
        policy = None
        if not trouble:
            policy = advice.text_of(ranking, _matches(ranking, workload), _measured())
    is_written = False
    if policy and write:
        trouble = _write(policy, write)
        is_written = not trouble
    if as_json:
        typer.echo(json.dumps(ranking.to_dict() | {"policy": policy}, indent=2))
    else:
        _print(ranking)
        if is_written:
            typer.echo(f"\nwritten to {write}")
        elif policy:
            typer.echo(f"\n{policy}", nl=False)
    if trouble:
        fail(trouble)


def _ranked(
    workload: Workload,
    chain: Sequence[Any],
    training: bool | None,
    seconds: float,
    *,
    remember: bool,
) -> Ranking:
    """Import the user's code, make the model and time it; an error of that code ends the bench."""
    try:
        subject = workload.build(_check_policy)
        if training is None:
            training = isinstance(subject.model, torch.nn.Module) and subject.model.training
        with shown(), cache(remember=remember):
            return rank(
                subject,
                chain,
                training=training,
                seconds=seconds,
                remember=remember,
                show=lambda step: typer.echo(f"composer: {step}", err=True),
            )
    except ComposerError:
        raise
    except Exception as error:  # noqa: BLE001  # shown: the user's code may raise anything
        show(error)
        raise typer.Exit(1) from None


def _check_policy() -> None:
    """Raise the mistakes in the policy in force before the model is made, which takes time."""
    graph = Facts("", "", "", False, False)
    resolve(graph, ONLY_TABLES, configured=session.current().configured)


def _write(policy: str, path: Path) -> str:
    """Write the policy; return why that failed, or an empty string."""
    try:
        path.write_text(policy, encoding="utf-8")
    except OSError as error:
        return f"{str(path)!r} cannot be written: {error}"
    return ""


def _matches(ranking: Ranking, workload: Workload) -> Sequence[str]:
    """Return globs for all names that a script's module may have; none if it is not a script."""
    if not workload.is_script:
        return ()
    return tuple(dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in ranking.models))


def _chain(text: str | None) -> Sequence[Any]:
    """Return a chain from names with commas between, or from TOML; empty if none is given."""
    if text is None:
        return ()
    chain: Sequence[Any] = names_in(text)
    if any(mark in text for mark in "{[\"'"):
        chain = _of_toml(text.strip())
    if not chain:
        fail("the chain is empty; without --chain all engines that are here take part", USAGE)
    return chain


def _of_toml(text: str) -> Sequence[Any]:
    """Return a list of TOML, written with or without its brackets."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return list(tomllib.loads(f"chain = [{inner}]")["chain"])
    except tomllib.TOMLDecodeError as error:
        example = '--chain \'["onnxrt", {backend = "inductor", options = {freezing = true}}]\''
        fail(f"the chain is no TOML, as in {example}: {error}", USAGE)


def _measured() -> str:
    """Return when and on what machine it was measured, with CPU capability and threads."""
    now = datetime.now(UTC).date().isoformat()
    kind = torch.backends.cpu.get_cpu_capability()
    threads = counted(torch.get_num_threads(), "thread")
    return f"{now}, torch {torch.__version__}, {kind}, {threads}"


def _print(ranking: Ranking) -> None:
    """Print the table of times, and below it the texts that are too long for a cell."""
    console = Console(highlight=False)
    console.print(_table(ranking))
    console.print(_RATIOS)
    if ranking.doubt:
        console.print(escape(ranking.doubt))
    for each in ranking.standings:
        for why in each.refusals:
            console.print(escape(printable(f"{each.label}: {why}")))


_RATIOS = "eager / this: the median of the rounds' ratios, not the ratio of the medians."


def _table(ranking: Ranking) -> Table:
    kind = "forward and backward" if ranking.training else "a call"
    title = f"{ranking.model} on {ranking.device}, ms of {kind}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("rounds", justify="right", no_wrap=True)
    table.add_column("eager / this (quartiles)", justify="right", width=16)
    for heading in ("largest error", "first call, s"):
        table.add_column(heading, justify="right", width=7)
    table.add_column("graphs served", overflow="fold", min_width=6)
    for each in ranking.standings:
        table.add_row(*(escape(cell) for cell in _cells(each, ranking.eager)))
    return table


def _cells(each: Standing, eager: Standing) -> tuple[str, ...]:
    served = [_served(each, name, number) for name, number in each.served.items()]
    return (
        each.label,
        cell(each.ms, ".3g"),
        str(len(each.turns) or ""),
        str(each.over(eager) or ""),
        cell(each.error, ".0e"),
        cell(each.seconds, ".1f"),
        printable(", ".join(served)),
    )


def _served(each: Standing, name: str, number: int) -> str:
    """``"1 of 2"`` graphs for the candidate itself; ``"onnxrt 1 of 2"`` for another name."""
    share = f"{number} of {each.graphs}"
    is_itself = each.candidate is not None and each.candidate.name == name
    return share if is_itself else f"{name} {share}"
