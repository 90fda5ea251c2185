"""``composer tune``: find the fastest engines of many models before anybody waits for them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from composer.cli.process import cache, refuse_switches
from composer.cli.usage import USAGE, PolicyFile, Remember, fail, fail_on
from composer.errors import ComposerError
from composer.knowledge.shared_store import SharedStore
from composer.policy import sources
from composer.system.subprocesses import Limits
from composer.telemetry.report import cell
from composer.tools.tune import Job, perform, read_jobs, this_machine
from composer.tools.tune.cluster import on_ray

Sources = Annotated[list[str], typer.Argument(help="Plans (.toml), or module:factory.")]
Store = Annotated[
    str, typer.Option("--store", help="Where verdicts are shared. Sets COMPOSER_VERDICT_STORE.")
]
Timeout = Annotated[float | None, typer.Option(min=1e-3, help="Seconds that a job may take.")]
Ray = Annotated[str, typer.Option("--ray", help="A Ray cluster's address: auto, local, host:port.")]
WorkingDir = Annotated[
    Path | None, typer.Option(help="With --ray: a folder that the nodes import from.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON for each job.")]


def tune(
    sources: Sources,
    policy: PolicyFile = None,
    store: Store = "",
    timeout: Timeout = None,
    ray: Ray = "",
    working_dir: WorkingDir = None,
    remember: Remember = True,
    as_json: Json = False,
) -> None:
    """Measure the engines of the policy in force on models, and keep the verdicts.

    The exit code is 1 if a job failed, or a verdict could not be kept.
    """
    refuse_switches("would stand for every chain that is to be measured")
    if working_dir:
        if not ray:
            fail("--working-dir is for the nodes of --ray; here modules are found as always", USAGE)
        if not working_dir.is_dir():
            fail(f"there is no folder {str(working_dir)!r}", USAGE)
    with fail_on(ComposerError), cache(remember=remember):
        jobs = read_jobs(sources)
        environment = _environment(policy, store)
        os.environ.update(environment)
        if not remember and (ray or _store()):
            fail("--no-remember keeps no verdict, so a store has no use; leave it out", USAGE)
        if ray and not os.environ.get("COMPOSER_VERDICT_STORE"):
            fail("with --ray the verdicts would stay on the nodes; say where by --store", USAGE)
        if url := _store():
            SharedStore(url).check()
        limits = Limits(isolate=True, timeout=timeout)
        if ray:
            results = on_ray(jobs, limits, ray, environment, working_dir)
        else:
            results = _here(jobs, limits)
        done = list(_printed(results, len(jobs), as_json))
    if not as_json:
        Console().print(*_tables(done))
    raise typer.Exit(int(any(each["error"] for each in done)))


def _environment(policy: Path | None, store: str) -> dict[str, str]:
    """Return the environment variables for the processes of the jobs, wherever they run."""
    environment = {"COMPOSER_VERDICT_STORE": store} if store else {}
    if policy is not None:
        sources.read(policy)
        environment["COMPOSER_CONFIG"] = str(policy.absolute())
    return environment


def _store() -> str | None:
    """Return the store of verdicts; the environment overrides the policy file."""
    if store := os.environ.get("COMPOSER_VERDICT_STORE"):
        return store
    book, _ = sources.in_force(None)
    return book.cache.store


def _here(jobs: Sequence[Job], limits: Limits) -> Iterator[dict[str, Any]]:
    """Do one job at a time; two at once would share the machine and disturb the times."""
    name = this_machine()
    for job in jobs:
        yield {**perform(job, limits), "machine": name}


def _printed(
    results: Iterator[dict[str, Any]], count: int, as_json: bool
) -> Iterator[dict[str, Any]]:
    """Yield the results, and print each when it comes."""
    for number, result in enumerate(results, 1):
        if as_json:
            typer.echo(json.dumps(result))
        else:
            engines = ", ".join(graph["chosen"] for graph in result["graphs"])
            outcome = result["error"] or engines
            typer.echo(f"{number}/{count}  {result['job']}: {outcome}", err=True)
        yield result


def _tables(results: Sequence[dict[str, Any]]) -> Iterable[Table]:
    """Return one table for each kind of machine."""
    tables: dict[str, Table] = {}
    for result in results:
        table = tables.setdefault(result["machine"], _table(result["machine"]))
        for row in _rows(result):
            table.add_row(*map(escape, row))
    return tables.values()


def _table(machine: str) -> Table:
    table = Table("model", "graph", "engine", title=machine)
    for heading in ("ms a call", "eager's"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("others, or what failed", overflow="fold")
    return table


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each graph of a job, or one row for a job without graphs."""
    if not result["graphs"]:
        yield result["job"], "", "", "", "", result["error"]
    for graph in result["graphs"]:
        engine = graph["chosen"]
        if graph["remembered"]:
            engine = f"{engine} (remembered)"
        ms, eager_ms = (cell(graph["timing"].get(key), ".4g") for key in ("ms", "eager_ms"))
        others = ", ".join(f"{name} {reason}" for name, reason in graph["others"].items())
        rest = "; ".join(filter(None, (result["error"], graph["why"], others)))
        yield result["job"], graph["graph"], engine, ms, eager_ms, rest
