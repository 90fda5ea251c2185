"""Which of torch's own operator samples run on an engine, and whether they are right there.

Every operator of torch's ``op_db``, and each that quantizes (``bench/quantized_ops.py``), is run
through composer with one engine in its chain and compared with eager: values, dtypes, shapes,
strides, structure, mutated inputs, gradients, and what is raised. Run from anywhere, with composer
installed::

    python bench/ops.py --ops add,sort --json bench/results/ops.json

With ``--values edges`` other numbers are written over the samples (``bench/edge_values.py``).

The samples run in a process of their own. If that dies, as engines do that divide by zero, the
operator is recorded as crashed and another process goes on with the rest. The exit status is 1 if
any operator is wrong, raises what eager does not, or crashes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import quantized_ops
import torch
from differences import described, difference, tidy
from edge_values import in_float32, is_elementwise, is_refilled, refills, rounded
from timing import cores, machine, write_json
from torch.utils._pytree import tree_flatten, tree_map

import composer

log = logging.getLogger("bench.ops")

FORWARD, BACKWARD = "forward", "backward"
SAMPLES, EDGES = "samples", "edges"
SEVERITY = ("crashed", "raised", "wrong")
VERDICTS = ("taken", "partly", "declined", *reversed(SEVERITY), "nothing", "no graph")
NOTHING = "the graph computes nothing"
"""What composer says of a graph that makes views only: there is no work that an engine could do."""

UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
UNDEFINED |= {"new_empty_strided"}
"""Operators whose values are whatever was in memory: only their metadata are compared."""

DRAWING = {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal"}
DRAWING |= {"rand_like", "randint", "randint_like", "randn", "randn_like", "uniform"}
"""Operators that only draw random numbers, which are torch's: no work for an engine either."""

DRAWN = "random numbers stay torch's"


@dataclass(frozen=True, slots=True)
class Settings:
    """What both processes need to know: which samples, and the policy."""

    dtype: str
    samples: int
    engine: str
    min_coverage: float
    references: bool
    values: str


@dataclass(frozen=True, slots=True)
class Trial:
    """One sample: ``kind`` is a verdict.

    ``refused`` are (reason, message) of the attempts that were not accepted. ``coverage`` is the
    part of the graphs that the engine computes, their mean; ``None`` where there is none to take.
    """

    kind: str
    refused: tuple[tuple[str, str], ...] = ()
    problem: str = ""
    coverage: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One operator in one direction: its verdict, and how many samples came to which.

    ``coverage`` is the mean of the samples', ``whole`` whether each of them is covered in full.
    """

    op: str
    direction: str
    verdict: str
    samples: Mapping[str, int] = field(default_factory=dict)
    coverage: float | None = None
    whole: bool = False
    refused: Sequence[Sequence[str]] = ()
    problems: Sequence[str] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if anything is wrong, 2 if it was asked wrongly."""
    options = parse(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    names = "dtype", "samples", "engine", "min_coverage", "references", "values"
    settings = Settings(**{name: getattr(options, name) for name in names})
    if options.report_to is not None:
        work(options.units, settings, options.report_to)
        return 0
    names = [each for each in options.ops or sorted(operators()) if is_tried(each, settings)]
    directions = (FORWARD, BACKWARD) if options.backward else (FORWARD,)
    units = [f"{direction}:{name}" for direction in directions for name in names]
    record: dict[str, Any] = {"machine": machine(), "settings": asdict(settings)}
    results = sweep_all(units, settings, options.limit, options.verbose, options.jobs)
    record["summary"] = {each: summary(results, each) for each in directions}
    record["results"] = [asdict(each) for each in results]
    if options.json:
        write_json(options.json, record)
    show(results, directions)
    return int(any(each.verdict in SEVERITY for each in results))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; unknown operators are an error here."""
    parser = argparse.ArgumentParser(description="Torch's operator samples on one engine.")
    parser.add_argument("--ops", type=operator_names, metavar="A,B", help="default: all of op_db")
    parser.add_argument("--dtype", default="float32", help="of the samples (float32)")
    parser.add_argument("--samples", type=int, default=12, help="an operator at most (12)")
    parser.add_argument(
        "--references",
        action="store_true",
        help="torch's wider samples: small, large and extremal values, mixed dtypes, strides",
    )
    parser.add_argument(
        "--values",
        choices=(SAMPLES, EDGES),
        default=SAMPLES,
        help="edges: each sample again with NaN, infinities, ties, and the ends of the range",
    )
    parser.add_argument("--engine", default="onnxrt", help="the chain's only member (onnxrt)")
    parser.add_argument(
        "--min-coverage", type=float, default=0.5, help="of the policy (0.5, as everywhere)"
    )
    parser.add_argument(
        "--backward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gradients, too, for operators that have them",
    )
    parser.add_argument("--jobs", type=int, default=cores() or 1, help="workers (one a core)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds an operator (120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--verbose", action="store_true", help="show what the samples print")
    parser.add_argument("--report-to", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--units", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def operator_names(text: str) -> list[str]:
    """The names in a list with commas between; every unknown one is complained of at once."""
    names = [name.strip() for name in text.split(",")]
    unknown = sorted(set(names) - operators().keys())
    if unknown:
        raise argparse.ArgumentTypeError(f"no such operators: {', '.join(unknown)}")
    return names


def operators() -> dict[str, Any]:
    """Torch's operator database and the operators that quantize, by name and variant.

    Torch's test utilities import ``expecttest``, of which nothing here is used. They seed the
    generator in the midst of what draws, which no graph can hold; here every run is seeded before.
    """
    if importlib.util.find_spec("expecttest") is None:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_methods_invocations as database

    vars(database)["wrapper_set_seed"] = lambda draw, *args, **kwargs: draw(*args, **kwargs)
    known = [*database.op_db, *quantized_ops.database()]
    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in known}


def is_tried(name: str, settings: Settings) -> bool:
    """Whether there are values for an operator of the kind that is asked for."""
    return settings.values == SAMPLES or is_refilled(name, getattr(torch, settings.dtype))


# --- the process that watches -------------------------------------------------------------------


def sweep_all(
    units: Sequence[str], settings: Settings, limit: float, verbose: bool, jobs: int
) -> list[Result]:
    """Results of all units in their order, by so many workers at a time."""
    shares = [units[i::jobs] for i in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        found = [*pool.map(lambda share: sweep(share, settings, limit, verbose), shares)]
    return [found[i % jobs][i // jobs] for i in range(len(units))]


def sweep(units: Sequence[str], settings: Settings, limit: float, verbose: bool) -> list[Result]:
    """Results of all units in their order, whatever the processes that run them come to."""
    results: list[Result] = []
    while len(results) < len(units):
        left = units[len(results) :]
        done, ended = run_worker(left, settings, limit, verbose)
        results += done
        if len(done) == len(left):
            break
        direction, _, name = left[len(done)].partition(":")
        log.info("%s %s: %s", name, direction, ended)
        results.append(Result(name, direction, "crashed", problems=[ended]))
    return results


def run_worker(
    units: Sequence[str], settings: Settings, limit: float, verbose: bool
) -> tuple[list[Result], str]:
    """What one process came to before it ended, and how it ended.

    Raises:
        RuntimeError: it ended before it began with any unit.
    """
    reader, writer = os.pipe()
    command = [sys.executable, __file__, "--report-to", str(writer), "--units", json.dumps(units)]
    command += ["--dtype", settings.dtype, "--samples", str(settings.samples)]
    command += ["--engine", settings.engine, "--min-coverage", str(settings.min_coverage)]
    command += ["--values", settings.values]
    command += ["--references"] if settings.references else []
    output = None if verbose else subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=output, stderr=output, pass_fds=(writer,))
    os.close(writer)
    done: list[Result] = []
    at = ""
    with os.fdopen(reader, encoding="utf-8") as lines, process:
        watchdog = threading.Timer(math.inf, process.kill)
        for line in lines:
            news = json.loads(line)
            at = news.get("at", at)
            if "at" not in news:
                done.append(Result(**news))
            if "at" not in news or at.startswith("0"):
                watchdog.cancel()
                watchdog = threading.Timer(limit, process.kill)
                watchdog.start()
        watchdog.cancel()
    if not at:
        raise RuntimeError(f"the worker ended with {process.returncode} before it began")
    return done, f"{ending(process.returncode, limit)} at sample {at}"


def ending(status: int, limit: float) -> str:
    """How a process ended, in words."""
    if status == -signal.SIGKILL:
        return f"more than {limit:g} s, or out of memory,"
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


# --- the process that runs samples --------------------------------------------------------------


def work(units: Iterable[str], settings: Settings, report_to: int) -> None:
    """Run units, with a line of JSON for each sample begun and each unit done."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    known = operators()
    with os.fdopen(report_to, "w", encoding="utf-8", buffering=1) as stream:

        def tell(news: Mapping[str, Any]) -> None:
            stream.write(json.dumps(news) + "\n")

        for unit in units:
            direction, _, name = unit.partition(":")
            tell(asdict(judge(name, direction, known[name], settings, tell)))


def judge(
    name: str,
    direction: str,
    op: Any,
    settings: Settings,
    tell: Callable[[Mapping[str, Any]], None],
) -> Result:
    """Try the samples of one operator and sum them up."""
    tell({"at": "0"})
    samples = outcome(samples_of, op, direction, settings)
    trials: list[Trial] = []
    if isinstance(samples, Exception):
        trials.append(Trial("no graph", problem=f"no samples: {described(samples)}"))
        samples = []
    for index, sample in enumerate(samples):
        tell({"at": f"{index + 1}"})
        trials.append(attempt(name, op, sample, direction, settings))
    kinds = Counter(trial.kind for trial in trials)
    refused = sorted({each for trial in trials for each in trial.refused})
    problems = list(dict.fromkeys(trial.problem for trial in trials if trial.problem))
    counts = {kind: kinds[kind] for kind in sorted(kinds)}
    parts = [trial.coverage for trial in trials if trial.coverage is not None]
    coverage = sum(parts) / len(parts) if parts else None
    whole = bool(parts) and min(parts) == 1.0
    return Result(name, direction, verdict(kinds), counts, coverage, whole, refused, problems[:5])


def verdict(kinds: Counter[str]) -> str:
    """What the samples' kinds make of their operator."""
    worst = next((kind for kind in SEVERITY if kinds[kind]), None)
    graphs = sum(kinds.values()) - kinds["no graph"] - kinds["nothing"]
    if worst is not None:
        return worst
    if not graphs:
        return "nothing" if kinds["nothing"] else "no graph"
    if kinds["taken"] == graphs:
        return "taken"
    return "partly" if kinds["taken"] or kinds["partly"] else "declined"


def samples_of(op: Any, direction: str, settings: Settings) -> list[Any]:
    """At most so many of the operator's samples, spread from the first to the last."""
    dtype = getattr(torch, settings.dtype)
    backward = direction == BACKWARD
    supported = op.supported_backward_dtypes("cpu") if backward else op.supported_dtypes("cpu")
    if dtype not in supported or (backward and not op.supports_autograd):
        return []
    seed(0)
    make = op.reference_inputs if settings.references else op.sample_inputs
    samples = list(make("cpu", dtype, requires_grad=backward))
    last, count = len(samples) - 1, min(settings.samples, len(samples))
    return [samples[round(i * last / max(count - 1, 1))] for i in range(count)]


def attempt(name: str, op: Any, sample: Any, direction: str, settings: Settings) -> Trial:
    """Run one sample in eager and through the engine, with each of the values asked for."""

    def function(value: Any, args: Any, kwargs: Any) -> Any:
        return op.op(value, *args, **kwargs)

    torch.compiler.reset()
    composer.reset()
    engine = settings.engine
    options: dict[str, Any] = {"chain": [engine], "min_coverage": settings.min_coverage}
    composer.configure({"cache": {"artefacts": 0}})  # for thousands of graphs, each run once
    compiled = torch.compile(function, backend="composer", options=options)
    eager, ours = (functools.partial(RUNS[direction], each) for each in (function, compiled))
    returned, raised, problems = False, False, []
    for values, given in filled(name, op, sample, settings):
        expected, actual = outcome(eager, given, 0), outcome(ours, given, 0)
        returned |= not isinstance(expected, Exception)
        if problem := unlike(op, eager, given, expected, actual, settings):
            raised |= isinstance(actual, Exception)
            problems.append(f"{values}: {problem}")
    reports = composer.reports()
    refused = tuple(refusals(reports))
    if problems:
        said = f"{'; '.join(problems)}; of {outline(sample)}"
        return Trial("raised" if raised else "wrong", refused, said)
    taken = [each.chosen == engine and not each.runtime.fallbacks for each in reports]
    if not taken or not returned:
        return Trial("no graph")
    idle = (NOTHING, DRAWN) if op.name in DRAWING else (NOTHING,)
    if not any(taken) and all(any(each in said for each in idle) for _, said in refused):
        return Trial("nothing", refused)
    kind = "taken" if all(taken) else "partly" if any(taken) else "declined"
    return Trial(kind, refused, coverage=coverage(reports, engine))


def unlike(
    op: Any,
    eager: Callable[..., Any],
    given: Any,
    expected: Any,
    actual: Any,
    settings: Settings,
) -> str:
    """How the engine's results differ; what another seed changes as well is not compared."""
    problem = difference(expected, actual, values=op.name not in UNDEFINED)
    if problem and difference(expected, outcome(eager, given, 1)):
        problem = difference(expected, actual, values=False)
    if problem and settings.values == EDGES and not is_elementwise(op):
        return "" if is_more_exact(eager, given, expected, actual) else problem
    return problem


def is_more_exact(eager: Callable[..., Any], given: Any, expected: Any, actual: Any) -> bool:
    """Whether halves are as eager computes them in float32: they are not rounded in between."""
    wide = outcome(eager, in_float32(given), 0)
    if any(isinstance(each, Exception) for each in (wide, expected, actual)):
        return False
    return not difference(rounded(wide, expected), actual)


def filled(name: str, op: Any, sample: Any, settings: Settings) -> Iterator[tuple[str, Any]]:
    """The sample with each of the values asked for, and what they are called."""
    if settings.values == SAMPLES:
        return iter([("sample", sample)])
    return refills(name, op, sample, getattr(torch, settings.dtype))


def without_gradients(function: Callable[..., Any], sample: Any, number: int) -> Any:
    """What the function returns, and its arguments as it leaves them."""
    given = twin((sample.input, sample.args, sample.kwargs))
    seed(number)
    with torch.no_grad():
        returned = function(*given)
    return sample.output_process_fn_grad(returned), given


def with_gradients(function: Callable[..., Any], sample: Any, number: int) -> Any:
    """What the function returns, and the gradients of all inputs."""
    given = twin((sample.input, sample.args, sample.kwargs))
    inputs = [leaf for leaf in tensors(given) if leaf.requires_grad]
    seed(number)
    returned = sample.output_process_fn_grad(function(*given))
    outputs = [each for each in tensors(returned) if each.requires_grad]
    if not outputs or not inputs:
        return returned, None
    seed(number)
    upstream = [torch.randn_like(each) for each in outputs]
    return returned, torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)


RUNS = {FORWARD: without_gradients, BACKWARD: with_gradients}
"""How a function is run; both take it, a sample, and a seed."""


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    """What the call returns, or the exception that it raises."""
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001  # what is raised is compared, too
        return error


def coverage(reports: Sequence[Any], engine: str) -> float:
    """The part of the graphs that the engine computes; nothing of those that it was refused."""
    accepted = (each for report in reports if report.chosen == engine for each in report.attempts)
    parts = [1.0 if each.coverage is None else each.coverage for each in accepted if each.accepted]
    return sum(parts) / len(reports)


def refusals(reports: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Reason and message of every attempt that was not accepted, and of calls that fell back."""
    for report in reports:
        for each in report.attempts:
            if not each.accepted:
                yield str(each.reason or each.status), tidy(each.message)
        if report.runtime.fallbacks:
            yield "raised_at_runtime", tidy(report.runtime.last_error)


def twin(values: Any) -> Any:
    """Copies of all tensors, with their strides and the memory that they share; leaves, as were."""
    memo: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return copy.deepcopy(value.detach(), memo).requires_grad_(value.requires_grad)

    return tree_map(copied, values)


def tensors(values: Any) -> list[torch.Tensor]:
    """All tensors within nested values."""
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def seed(number: int) -> None:
    """Start the generators that operators and their samples draw from anew."""
    torch.manual_seed(number)
    random.seed(number)


# --- words --------------------------------------------------------------------------------------


def outline(sample: Any) -> str:
    """The sample's arguments in few words."""
    named = [f"{name}={brief(value)}" for name, value in sample.kwargs.items()]
    return ", ".join([brief(sample.input), *map(brief, sample.args), *named])[:200]


def brief(value: Any) -> str:
    """A tensor by dtype and shape, anything else as it prints."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(brief, value))}]"
    return tidy(repr(value))


def summary(results: Sequence[Result], direction: str) -> dict[str, float | int]:
    """Operators by verdict, and how many of them yield a graph, and one that computes something.

    ``taken_for_all`` counts operators all of whose samples are taken, ``taken_for_some`` those with
    at least one, ``taken_whole`` those all of whose graphs the engine computes in full; all are
    shares of the operators that compute something. ``coverage`` is the mean over these.
    """
    ours = [each for each in results if each.direction == direction]
    verdicts = Counter(each.verdict for each in ours)
    graphs = sum(verdicts.values()) - verdicts["no graph"]
    computing = graphs - verdicts["nothing"]
    every, some = verdicts["taken"], verdicts["taken"] + verdicts["partly"]
    parts = [each.coverage for each in ours if each.coverage is not None]
    counts: dict[str, float | int] = {name: verdicts[name] for name in VERDICTS}
    counts |= {"graphs": graphs, "computing": computing}
    return counts | {
        "taken_for_all": every / max(computing, 1),
        "taken_for_some": some / max(computing, 1),
        "taken_whole": sum(each.whole for each in ours) / max(computing, 1),
        "coverage": sum(parts) / max(len(parts), 1),
    }


def show(results: Sequence[Result], directions: Iterable[str]) -> None:
    """Print the summary, and everything that is not as it should be."""
    for each in results:
        if each.verdict in SEVERITY:
            print(f"{each.op} {each.direction} {each.verdict}: {'; '.join(each.problems)}")
    for direction in directions:
        counts = summary(results, direction)
        print(f"{direction}: " + ", ".join(f"{name} {counts[name]}" for name in VERDICTS))
        print(
            f"  {counts['graphs']} operators with a graph; of {counts['computing']} that compute, "
            f"taken for all samples {counts['taken_for_all']:.1%}, for some "
            f"{counts['taken_for_some']:.1%}; whole for all {counts['taken_whole']:.1%}, "
            f"covered on average {counts['coverage']:.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())
