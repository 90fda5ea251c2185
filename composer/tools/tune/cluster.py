"""Runs the jobs of a plan on a Ray cluster: each job once on every type of machine.

A verdict holds for machines of the same type. So the nodes are asked for their type, and each job
is done by one node of each type. A node does one job at a time, with all its processors and GPUs
reserved, because other work on it would disturb the measurement.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer.errors import OptionError
from composer.system import distribution
from composer.system.subprocesses import Limits
from composer.tools.tune.plan import Job
from composer.tools.tune.work import perform, this_machine


@dataclass
class _Kind:
    """The nodes of the same type, and the jobs that none of them has begun."""

    nodes: list[Any] = field(default_factory=list)
    jobs: deque[Job] = field(default_factory=deque)


class Node:
    """A Ray actor that does jobs on its machine."""

    def describe(self) -> str:
        """Return the description of the machine."""
        return this_machine()

    def perform(self, job: Job, limits: Limits, environment: Mapping[str, str]) -> dict[str, Any]:
        """Do one job, with torch's default number of threads, not Ray's limit."""
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(environment)
        return perform(job, limits)


def on_ray(
    jobs: Sequence[Job],
    limits: Limits,
    address: str,
    environment: Mapping[str, str],
    working_dir: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield results as they come: those of :func:`~composer.tools.tune.work.perform`, ``machine``.

    Args:
        jobs: The jobs, each to be done on every type of machine.
        limits: The limits of each job.
        address: The cluster's address; ``"auto"`` finds this machine's, ``"local"`` starts one.
        environment: Environment variables for the jobs, such as the store of verdicts.
        working_dir: A folder that is copied to the nodes, which import from it.

    Raises:
        OptionError: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise OptionError(f"{error}; {distribution.install('ray')}") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of the cluster that "local" starts
    shared = {"working_dir": str(working_dir)} if working_dir else {}
    try:
        ray.init(
            address=address, runtime_env=shared, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OptionError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        kinds = _kinds(ray, jobs)
        yield from _results(ray, kinds, limits, environment)
    finally:
        ray.shutdown()


def _kinds(ray: Any, jobs: Sequence[Job]) -> dict[str, _Kind]:
    """Start an actor on every node that is alive, and group them by the type of machine."""
    pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    nodes = []
    for each in ray.nodes():
        if each["Alive"]:
            options = ray.remote(Node).options(
                num_cpus=each["Resources"].get("CPU", 0),
                num_gpus=each["Resources"].get("GPU", 0),
                scheduling_strategy=pinned(each["NodeID"], soft=False),
            )
            nodes.append(options.remote())
    kinds: dict[str, _Kind] = {}
    for node, name in zip(nodes, ray.get([each.describe.remote() for each in nodes]), strict=True):
        kinds.setdefault(name, _Kind(jobs=deque(jobs))).nodes.append(node)
    return kinds


def _results(
    ray: Any, kinds: Mapping[str, _Kind], limits: Limits, environment: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Give each free node the next job, and yield results; other nodes replace a lost one."""
    under_way: dict[Any, tuple[str, Any, Job]] = {}

    def give(name: str, node: Any) -> None:
        if kinds[name].jobs:
            job = kinds[name].jobs.popleft()
            reference = node.perform.remote(job, limits, environment)
            under_way[reference] = name, node, job

    for name, kind in kinds.items():
        for node in kind.nodes:
            give(name, node)
    while under_way:
        (done,), _ = ray.wait(list(under_way))
        name, node, job = under_way.pop(done)
        try:
            result = ray.get(done)
        except ray.exceptions.RayError as error:
            result = _not_done(job, f"the node was lost: {type(error).__name__}")
            kinds[name].nodes.remove(node)
        else:
            give(name, node)
        yield {**result, "machine": name}
    for name, kind in kinds.items():
        for job in kind.jobs:
            yield {**_not_done(job, "no node of this kind is left"), "machine": name}


def _not_done(job: Job, why: str) -> dict[str, Any]:
    return {"job": str(job.workload), "graphs": [], "error": why, "seconds": 0.0}
