"""``composer tune``: find the fastest engines of many models before anybody waits for them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from composer import config
from composer.chain.select.shared_store import SharedStore
from composer.cli.process import nothing_remembered, refuse_switches
from composer.cli.usage import USAGE, PolicyFile, Remember, fail
from composer.errors import ComposerError
from composer.system.subprocesses import Limits
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
    if working_dir and not ray:
        fail("--working-dir is for the nodes of --ray; here modules are found as always", USAGE)
    if working_dir and not working_dir.is_dir():
        fail(f"there is no folder {str(working_dir)!r}", USAGE)
    if not remember and (store or ray or _store()):
        fail("--no-remember keeps no verdict, so a store has no use; leave it out", USAGE)
    with nullcontext() if remember else nothing_remembered():
        done = _measured(sources, policy, store, timeout, ray, working_dir, as_json=as_json)
    if not as_json:
        Console().print(*_tables(done))
    raise typer.Exit(int(any(each["error"] for each in done)))


def _measured(
    sources: list[str],
    policy: Path | None,
    store: str,
    timeout: float | None,
    ray: str,
    working_dir: Path | None,
    *,
    as_json: bool,
) -> list[dict[str, Any]]:
    """Do the jobs, and tell of each when it is done. A mistake ends the command."""
    try:
        jobs = read_jobs(sources)
        environment = _environment(policy, store)
        os.environ.update(environment)
        limits = Limits(isolate=True, timeout=timeout)
        if ray and not os.environ.get("COMPOSER_VERDICT_STORE"):
            fail("with --ray the verdicts would stay on the nodes; say where by --store", USAGE)
        if url := _store():
            SharedStore(url).check()
        folder = str(working_dir) if working_dir else None
        results = on_ray(jobs, limits, ray, environment, folder) if ray else _here(jobs, limits)
        return list(_said(results, len(jobs), as_json))
    except ComposerError as error:
        fail(str(error), USAGE)


def _environment(policy: Path | None, store: str) -> dict[str, str]:
    """Return the environment variables for the processes of the jobs, wherever they run."""
    found = {"COMPOSER_VERDICT_STORE": store} if store else {}
    if policy is not None:
        config.read(policy)
        found["COMPOSER_CONFIG"] = str(policy.absolute())
    return found


def _store() -> str | None:
    """Return the store of verdicts; the environment overrides the policy file."""
    if store := os.environ.get("COMPOSER_VERDICT_STORE"):
        return store
    return config.in_force(None).cache.store


def _here(jobs: Sequence[Job], limits: Limits) -> Iterator[dict[str, Any]]:
    """Do one job at a time; two at once would share the machine and disturb the times."""
    name = this_machine()
    return ({**perform(job, limits), "machine": name} for job in jobs)


def _said(results: Iterator[dict[str, Any]], count: int, as_json: bool) -> Iterator[dict[str, Any]]:
    """Return the results, and print each when it comes."""
    for number, result in enumerate(results, 1):
        if as_json:
            typer.echo(json.dumps(result))
        else:
            served = ", ".join(graph["chosen"] for graph in result["graphs"])
            said = result["error"] or served
            typer.echo(f"{number}/{count}  {result['job']}: {said}", err=True)
        yield result


def _tables(results: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Yield one table for each kind of machine."""
    for name in dict.fromkeys(result["machine"] for result in results):
        table = Table("model", "graph", "engine", title=name)
        for heading in ("ms a call", "eager's"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("others, or what failed", overflow="fold")
        for result in results:
            if result["machine"] == name:
                for graph in result["graphs"] or [None]:
                    table.add_row(*map(escape, _row(result, graph)))
        yield table


def _row(result: dict[str, Any], graph: dict[str, Any] | None) -> tuple[str, ...]:
    if graph is None:
        return result["job"], "", "", "", "", result["error"]
    others = ", ".join(f"{name} {reason}" for name, reason in graph["others"].items())
    times = (f"{graph['timing'][key]:.4g}" if key in graph["timing"] else "" for key in _TIMES)
    rest = "; ".join(filter(None, (result["error"], graph["why"], others)))
    engine = f"{graph['chosen']} (remembered)" if graph["remembered"] else graph["chosen"]
    return result["job"], graph["graph"], engine, *times, rest


_TIMES = ("ms", "eager_ms")
