"""``composer tune``: plans, jobs in processes of their own, and machines of a Ray cluster."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from composer import session
from composer.cli import app, tune
from composer.errors import OptionError
from composer.knowledge.shared_store import SharedStore
from composer.policy import sources
from composer.records import Attempt, CompileReport, Reason, Status
from composer.system import disk
from composer.system.subprocesses import Limits
from composer.tools.bench.workload import Workload
from composer.tools.tune import Job, read_jobs, work
from composer.tools.tune.cluster import on_ray
from composer.tools.tune.plan import Plan

MODELS = """
import os, torch

def mlp(batch=4):
    return torch.nn.Linear(3, 3), torch.ones(batch, 3)

def dies():
    os._exit(3)
"""
PLAN = """
[[models]]
target = "models_to_tune:mlp"
shapes = [{ batch = 1 }, { batch = 2 }]
options = { chain = ["aot_eager"] }

[[models]]
target = "models_to_tune:mlp"
training = true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with models and a plan."""
    (tmp_path / "models_to_tune.py").write_text(MODELS)
    (tmp_path / "plan.toml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for variable in ("COMPOSER_CONFIG", "COMPOSER_VERDICT_STORE"):  # which the command sets
        monkeypatch.setenv(variable, "")
    yield tmp_path
    sys.modules.pop("models_to_tune", None)


def composer(*args: str) -> Any:
    return CliRunner().invoke(app, ["tune", *args])


def test_plan_has_a_job_for_each_shape(folder: Path) -> None:
    """In order, with the options of the model; without shapes the factory's own defaults."""
    one, two, trains = read_jobs(["plan.toml"])
    assert [each.arguments for each in (one, two, trains)] == [{"batch": 1}, {"batch": 2}, {}]
    assert [each.training for each in (one, two, trains)] == [False, False, True]
    assert one.options == {"chain": ["aot_eager"]}
    assert str(two.workload) == "models_to_tune:mlp(batch=2)"


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("[[models]]\ntarget = 'm:f'\nshape = []\n", "shapes"),
        ("[[models]]\ntarget = 'm:f'\nshapes = []\n", "nothing to tune"),
        ("[[models]]\ntarget = 'm:f'\noptions = { chian = [] }\n", "'chain'"),
        ("[[models]]\ntarget = 'm:f'\noptions = { select = 'first' }\n", "a plan measures"),
        ("[[models]]\ntarget = 'm:f'\noptions = { locked = true }\n", "a plan measures"),
        ("[[models]]\ntarget = 'm:f'\noptions = { chain = ['onxrt'] }\n", "mean 'onnxrt'?"),
        ("[[models]]\ntarget = 'my_models'\n", "a target is module:factory"),
        ("[[models]]\ntraget = 'm:f'\n", "option 'models[0].target' is missing;"),
        ("[[models]]\ntarget = 'm:f'\nshapes = { batch = 1 }\n", "should be a list"),
        ("\ufeff[[models]]\ntarget = 'm'\n", "a target is module:factory"),
        ("models = []\n", "without a model there is nothing to tune"),
        ("version = 2\nmodels = []\n", "version"),
        ("version = true\nmodels = []\n", "the version of the format is the whole number 1"),
        ("models = [", "cannot be read"),
    ],
)
def test_mistakes_in_a_plan_are_named(folder: Path, plan: str, said: str) -> None:
    """With the file, before anything is measured."""
    (folder / "wrong.toml").write_text(plan, encoding="utf-8")
    done = composer("wrong.toml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("composer: ")
    assert "wrong.toml" in done.stderr
    assert said in done.stderr


def test_plan_may_say_how_long_to_measure() -> None:
    """Without a word on ``by``, which a job sets itself."""
    entry = {"target": "m:f", "options": {"select": {"seconds": 20}}}
    (job,) = Plan.model_validate({"models": [entry]}).models[0].jobs()
    assert job.options == entry["options"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["nonsense"], "neither a plan (a .toml file) nor module:factory"),
        (["missing.toml"], "missing.toml"),
        (["plan.toml", "--policy", "missing.toml"], "missing.toml"),
        (["plan.toml", "--ray", "auto"], "--store"),
        (["plan.toml", "--no-remember", "--store", "s3://a/b"], "a store has no use"),
        (["plan.toml", "--working-dir", "."], "for the nodes of --ray"),
        (["plan.toml", "--working-dir", "nowhere", "--ray", "auto"], "no folder 'nowhere'"),
    ],
)
def test_mistakes_in_the_command_are_named(folder: Path, asked: list[str], said: str) -> None:
    """Exit code 2, as for any wrong use of a command."""
    done = composer(*asked)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bogus://x/y", "'bogus://x/y' cannot be used: ValueError: Protocol not known: bogus"),
        ("plan.toml", "'plan.toml' cannot be used: NotADirectoryError"),
        ("memory://a/b", "'memory://a/b' ends with the process that fills it"),
        ("simplecache::memory://a/b", "ends with the process that fills it"),
    ],
)
@pytest.mark.parametrize("place", ["option", "variable", "policy"])
def test_store_that_keeps_nothing_is_found_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, url: str, said: str, place: str
) -> None:
    """Wherever it is named; nobody would find the verdicts."""
    monkeypatch.setattr(tune, "perform", None)
    asked = ["models_to_tune:mlp"]
    match place:
        case "option":
            asked += ["--store", url]
        case "variable":
            monkeypatch.setenv("COMPOSER_VERDICT_STORE", url)
        case "policy":
            (folder / "policy.toml").write_text(f"[cache]\nstore = '{url}'\n")
            asked += ["--policy", "policy.toml"]
    done = composer(*asked)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("bogus://me:secret@host/x", "bogus://host/x"),
        ("bogus://host/x?token=secret", "bogus://host/x"),
        ("bogus://host/x?a=1&sig=secret%2F==#secret", "bogus://host/x"),
        ("bogus::https://me:secret@host/x?token=secret", "bogus::https://host/x"),
        ("zip://a?sig=secret::bogus://host/x?token=secret", "zip://a::bogus://host/x"),
    ],
)
def test_store_that_a_secret_opens_is_named_without_it(url: str, name: str) -> None:
    """On its way to a terminal."""
    with pytest.raises(OptionError) as caught:
        SharedStore(url).check()
    assert str(caught.value).startswith(f"the verdict store '{name}' cannot")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "made",
    [
        lambda net, x: (net, x),
        lambda net, x: (net, (x,)),
        lambda net, x: (net, {"input": x}),
        lambda net, x: (net, (), {"input": x}),
    ],
)
def test_factory_gives_a_model_and_its_inputs(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tensor, a tuple, a mapping, or both of the latter."""
    net, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    monkeypatch.setattr(sys.modules[__name__], "factory", lambda: made(net, x), raising=False)
    subject = Workload(f"{__name__}:factory").build()
    assert torch.equal(subject.call(subject.model), net(x))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torch", "MODULE:FACTORY"),
        ("no_such_module:make", "cannot be imported"),
        ("nowhere.py:make", "there is no script"),
        ("../models:make", "the path of a script ends in .py"),
        ("torch:nothing", "has no function"),
        ("torch:__version__", "has no function"),
        ("torch:get_num_threads", "it has to return"),
        ("torch.nn:Identity", "it has to return"),
    ],
)
def test_what_is_no_factory_is_named(target: str, said: str) -> None:
    """With what it is to be."""
    with pytest.raises(OptionError, match=re.escape(target.partition(":")[0])) as raised:
        Workload(target).build()
    assert said in str(raised.value)


@pytest.mark.slow
def test_each_job_is_done_in_a_process_of_its_own(folder: Path) -> None:
    """One that ends its process fails alone; the exit code says that one did."""
    (folder / "policy.toml").write_text('[defaults]\nchain = ["aot_eager"]\n')
    done = composer(
        "models_to_tune:dies", "models_to_tune:mlp", "--policy", "policy.toml", "--json"
    )
    dead, fine = map(json.loads, done.stdout.splitlines())
    assert done.exit_code == 1
    assert dead["error"].startswith("crashed: ")
    assert "exited with status 3" in dead["error"]
    (graph,) = fine["graphs"]
    assert (fine["error"], graph["others"].keys() <= {"aot_eager"}) == ("", True)
    assert graph["chosen"] in ("aot_eager", "eager")


@pytest.mark.slow
@pytest.mark.parametrize("remember", [True, False])
def test_verdicts_are_kept_unless_nothing_is_to_be_remembered(folder: Path, remember: bool) -> None:
    """As ``bench`` says it, too."""
    (folder / "policy.toml").write_text('[defaults]\nchain = ["aot_eager"]\n')
    said = () if remember else ("--no-remember",)
    done = composer("models_to_tune:mlp", "--policy", "policy.toml", "--json", *said)
    assert done.exit_code == 0, done.output
    listed = CliRunner().invoke(app, ["cache", "list", "verdicts", "--json"])
    assert len(json.loads(listed.output)["entries"]) == int(remember)


@pytest.mark.slow
def test_callers_sinks_are_not_the_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that ``jsonl`` writes is the caller's; a job's child has none."""
    monkeypatch.setenv("COMPOSER_SINKS", "jsonl")
    monkeypatch.setenv("COMPOSER_TELEMETRY", str(folder / "run.jsonl"))
    (folder / "policy.toml").write_text('[defaults]\nchain = ["aot_eager"]\n')
    done = composer("models_to_tune:mlp", "--policy", "policy.toml", "--json")
    assert (done.exit_code, json.loads(done.stdout)["error"]) == (0, "")


@pytest.mark.slow
def test_factory_is_given_what_the_plan_says(folder: Path) -> None:
    """In a child process: infinity, dates and lists as TOML has them."""
    (folder / "models_to_tune.py").write_text(
        "def odd(**given):\n    raise RuntimeError(f'given {given}')\n"
    )
    (folder / "odd.toml").write_text(
        "[[models]]\ntarget = 'models_to_tune:odd'\n"
        "shapes = [{ scale = inf, day = 2024-01-02, sizes = [1, 2.5] }]\n"
        "options = { precision = { max_error = inf } }\n"
    )
    (told,) = map(json.loads, composer("odd.toml", "--json").stdout.splitlines())
    given = "{'scale': inf, 'day': datetime.date(2024, 1, 2), 'sizes': [1, 2.5]}"
    assert told["error"] == f"RuntimeError: given {given}"


@pytest.mark.slow
def test_job_whose_child_ends_says_what_it_printed_last(folder: Path) -> None:
    """An exception of the interpreter's, say."""
    (folder / "models_to_tune.py").write_text(
        "import os\nos.write(2, b'no licence\\n')\nos._exit(3)"
    )
    (told,) = map(json.loads, composer("models_to_tune:mlp", "--json").stdout.splitlines())
    assert told["error"].endswith("exited with status 3; no licence")


def measured(cache: Mapping[str, Any] = MappingProxyType({}), **job: Any) -> dict[str, Any]:
    """The job of one model, done in this process."""
    torch.compiler.reset()
    options = {"chain": ["aot_eager"]} | job
    payload = pickle.dumps(Job(target="models_to_tune:mlp", options=options))
    with sources.using({"cache": cache}):
        return work.measure(payload, lambda: None)


def test_job_says_what_is_wrong_with_the_policy(folder: Path) -> None:
    """And not that Dynamo's backend raised."""
    (folder / "composer.toml").write_text("[defaults]\nchian = []\n")
    assert "OptionError: " in (told := measured()["error"])
    assert "unknown option 'defaults.chian'; did you mean 'chain'?" in told


def test_store_gets_what_was_measured_before_there_was_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was off line then."""
    assert measured()["error"] == ""
    session.reset()
    monkeypatch.setattr(disk, "_PROCESS", "another")
    store = folder / "store"
    done = measured({"store": str(store)})
    (graph,) = done["graphs"]
    assert (done["error"], graph["unkept"], graph["remembered"]) == ("", "", True)
    (file,) = store.iterdir()
    before = file.read_text()
    measured({"store": str(store)})
    assert file.read_text() == before


def troubled_store(folder: Path) -> dict[str, Any]:
    (folder / "store").write_text("a file")
    return {"cache": {"store": str(folder / "store")}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (troubled_store, "the verdict store .* is not used any more in this process: "),
        (lambda folder: {"strict": True}, "the policy has none remembered"),
        (lambda folder: {"cache": {"verdicts": 0}}, "the policy has none remembered"),
    ],
)
@pytest.mark.filterwarnings("ignore::composer.errors.CacheWarning")
def test_verdict_that_is_not_kept_is_an_error(
    folder: Path, options: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would find it; measured now, or remembered from before."""
    for process in ("one", "another"):
        done = measured(**options(folder))
        assert re.match(rf"graph \d+ \[0/0\]: the verdict was not kept: {said}", done["error"])
        session.reset()
        measured()
        session.reset()
        monkeypatch.setattr(disk, "_PROCESS", process)


@pytest.mark.parametrize(
    ("switch", "value"),
    [("COMPOSER_DISABLE", "1"), ("COMPOSER_CHAIN", "eager"), ("COMPOSER_SELECT", "first")],
)
def test_nothing_is_tuned_under_a_switch_for_whoever_is_on_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, switch: str, value: str
) -> None:
    """It goes over the chains of policy and plan."""
    monkeypatch.setenv(switch, value)
    done = composer("models_to_tune:mlp")
    assert (done.exit_code, f"{switch} is set" in done.stderr) == (2, True)
    monkeypatch.setenv(switch, "")
    assert "neither a plan" in composer("nonsense").stderr


def row_of(chosen: str, *attempts: Attempt) -> dict[str, Any]:
    facts = {
        "time": "",
        "number": 1,
        "graph_id": "0/0",
        "graph_key": "",
        "model": "m.Net",
        "device": "cpu",
    }
    more = {"dtype": "", "training": False, "dynamic": False, "nodes": 1, "seconds": 1.0}
    told = {**facts, **more, "inputs": (), "policy": (), "chosen": chosen, "attempts": attempts}
    return work._row(CompileReport(**told))


def test_times_are_those_of_who_serves() -> None:
    """Of two of one name the one that serves, and eager's own where that does."""
    won = Attempt("inductor", Status.SUCCEEDED, None, "", 1.0, timing={"ms": 1.0})
    times = {"ms": 5.0, "eager_ms": 3.0, "remembered_in": "/verdicts"}
    lost = Attempt("inductor", Status.NOT_CHOSEN, Reason.SLOWER, "", 1.0, timing=times)
    assert row_of("inductor", won, lost)["timing"] == {"ms": 1.0}
    eager = row_of("eager", lost)
    assert (eager["timing"]["ms"], eager["timing"]["eager_ms"]) == (3.0, 3.0)
    assert eager["remembered"]
    assert row_of("eager", Attempt("a", Status.FAILED, None, "", 1.0))["timing"] == {}


@pytest.mark.slow
def test_jobs_run_on_a_ray_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, started for this; its nodes import from the folder they are given."""
    pytest.importorskip("ray", reason="pip install '.[ray]' is 240 MB that nothing else needs")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or Ray 2.60 warns
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    job = Job(target="models_to_tune:mlp", options={"chain": ["aot_eager"]})
    keep = {"COMPOSER_CACHE_DIR": os.environ["COMPOSER_CACHE_DIR"]}
    (done,) = on_ray([job], Limits(isolate=True), "local", keep, folder)
    assert done["error"] == ""
    assert [graph["chosen"] in ("aot_eager", "eager") for graph in done["graphs"]] == [True]
    assert "processors" in done["machine"]


class Cluster(ModuleType):
    """Ray as :mod:`composer.tools.tune.cluster` uses it, with nodes that are only names.

    ``lost`` are the nodes that die at their first job.
    """

    def __init__(self, kinds: dict[str, str], lost: tuple[str, ...] = ()) -> None:
        super().__init__("ray")
        self.kinds, self.lost = kinds, lost
        self.done: list[tuple[str, str]] = []
        error = type("RayError", (Exception,), {})
        self.exceptions = SimpleNamespace(RayError=error)
        affinity = lambda node, soft: node  # noqa: E731
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=affinity)
        self.util = SimpleNamespace(scheduling_strategies=strategies)
        self.is_up = False
        self.tells = ""

    def init(self, **_: Any) -> None:
        self.is_up = True
        self.tells = os.environ.get("RAY_USAGE_STATS_ENABLED", "by itself")

    def shutdown(self) -> None:
        self.is_up = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeID": name, "Resources": {"CPU": 2.0}} for name in self.kinds]

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=self.options)

    def options(self, *, num_cpus: float, num_gpus: float, scheduling_strategy: str) -> Any:
        assert (num_cpus, num_gpus) == (2.0, 0)
        name = scheduling_strategy
        describe = SimpleNamespace(remote=lambda: self.kinds[name])
        perform = SimpleNamespace(remote=lambda job, *_: (name, job.target))
        return SimpleNamespace(remote=lambda: SimpleNamespace(describe=describe, perform=perform))

    def wait(self, references: list[Any]) -> Any:
        return references[:1], references[1:]

    def get(self, what: Any) -> Any:
        if isinstance(what, list):
            return what
        node, target = what
        if node in self.lost:
            raise self.exceptions.RayError
        self.done.append((node, target))
        return {"job": target, "graphs": [], "error": "", "seconds": 0.0}


def jobs_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    monkeypatch.setitem(sys.modules, "ray", cluster)
    jobs = [Job(target="a:a"), Job(target="b:b")]
    found = [*on_ray(jobs, Limits(), "auto", {})]
    assert not cluster.is_up
    return sorted((each["machine"], each["job"], each["error"]) for each in found)


def test_each_kind_of_machine_does_every_job_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many nodes of a kind there are; they share its jobs."""
    cluster = Cluster({"one": "small", "two": "small", "three": "large"})
    found = jobs_on(cluster, monkeypatch)
    assert [each[:2] for each in found] == [
        (kind, job) for kind in ("large", "small") for job in ("a:a", "b:b")
    ]
    assert {node for node, _ in cluster.done} == {"one", "two", "three"}


@pytest.mark.parametrize(("said", "tells"), [(None, "0"), ("1", "1")])
def test_ray_tells_its_makers_nothing_unless_it_is_told_to(
    said: str | None, tells: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that is started would, by default."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", said or "")
    if said is None:
        monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    cluster = Cluster({"one": "small"})
    jobs_on(cluster, monkeypatch)
    assert cluster.tells == tells


def test_a_lost_node_leaves_its_jobs_to_others_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one it was at has failed; where no other is left, the rest have, too."""
    with_others = jobs_on(Cluster({"one": "small", "two": "small"}, lost=("one",)), monkeypatch)
    assert [error for *_, error in with_others] == ["the node was lost: RayError", ""]
    alone = jobs_on(Cluster({"one": "small"}, lost=("one",)), monkeypatch)
    assert [error for *_, error in alone] == [
        "the node was lost: RayError",
        "no node of this kind is left",
    ]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """And nothing is measured here instead."""
    monkeypatch.setitem(sys.modules, "ray", None)
    done = composer("plan.toml", "--ray", "auto", "--store", str(folder / "store"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "torch-compile-composer[ray]" in done.stderr
