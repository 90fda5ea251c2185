"""``composer bench``: a model of one's own, and the policy that follows, as a user types it."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common import compiled, last
from typer.testing import CliRunner

import composer
from composer.cli import app
from composer.cli import bench as bench_command
from composer.errors import OptionError, RankingError
from composer.policy import Candidate, Facts, sources
from composer.records import Attempt, Reason, Status
from composer.testing import FakeBackend
from composer.tools.bench import advice, ranking
from composer.tools.bench.ranking import COMPOSER, EAGER, Ranking, Standing, rank
from composer.tools.bench.subject import subject_of

runner = CliRunner()

MODELS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x, *, shift=0.0):
        return {"out": torch.relu(self.norm(self.layer(x))) + shift}

def make():
    return Net().eval(), torch.randn(4, 8)

def train():
    return Net(), (torch.randn(4, 8),), {"shift": 1.0}

def nothing():
    return Net()

NET = Net()
def bound():
    return Net().eval().forward, torch.ones(4, 8)

class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Broken()

    def forward(self, x):
        return self.inner(x)

class Broken(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        torch._dynamo.graph_break()
        return torch.relu(y)

def outer():
    return Outer().eval(), torch.ones(2, 3)

class Slow(torch.nn.Module):
    def forward(self, x):
        for _ in range(200):
            x = x + 1.0
        return x

def slow():
    return Slow(), torch.ones(2)

class Opaque(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        return x + 1.0

def opaque():
    return Opaque(), torch.ones(2)

def quick(gm, example_inputs):
    return lambda x: [x + 200.0]

def wrong(gm, example_inputs):
    return lambda *args: [each + 1 for each in gm(*args)]

def broken(gm, example_inputs):
    raise RuntimeError("cannot \\x1b[31mbuild this")

def fails_later(gm, example_inputs):
    calls = iter(range(3))
    def run(*args):
        if next(calls, None) is None:
            raise RuntimeError("device lost")
        return gm(*args)
    return run
"""


PRINTS = """
import ctypes, os
print("imported")

class Prints(torch.nn.Module):
    def forward(self, x):
        print("in forward")
        return x + 1.0

def prints():
    print("from python")
    os.system("echo from a program")
    ctypes.CDLL(None).puts(b"from C")
    return Prints(), torch.ones(2)
"""


RAISES = """
class Inner(torch.nn.Module):
    def forward(self, x):
        raise ValueError("no such size")

class Raises(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)

def raises():
    return Raises(), torch.ones(2)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with ``own_models.py``, as the working directory."""
    file = tmp_path / "own_models.py"
    file.write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield file
    sys.modules.pop("own_models", None)


def bench(*arguments: str, columns: int = 200) -> tuple[int, str]:
    result = runner.invoke(app, ["bench", *arguments], env={"COLUMNS": str(columns)})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout if "--json" in arguments else result.output


def test_bench_writes_a_policy_without_what_failed_or_was_wrong(models: Path) -> None:
    """The table names all; the file has reasons in its comments, and can be read back."""
    written = models.with_name("composer.toml")
    chain = "aot_eager,own_models:wrong,own_models:broken,own_models:fails_later"
    asked = ("own_models:make", "--chain", chain, "--seconds", "0.5", "--write", str(written))
    code, output = bench(*asked)
    assert code == 0, output
    for label in ("eager", "aot_eager", "own_models:wrong", COMPOSER):
        assert label in output
    text = written.read_text()
    assert "# left out: own_models:wrong: own_models:wrong rejected (numeric_mismatch)" in text
    assert "cannot  [31mbuild this" in text
    assert "left out: own_models:fails_later: raised when it was timed" in text
    (rule,) = sources.read(tomllib.loads(text)).models
    assert rule.match.holds(Facts("own_models.Net", "cpu", "float32", False, False))
    assert {candidate.name for candidate in rule.chain} <= {"aot_eager", "eager"}
    assert "exists; --force overwrites it" in bench(*asked)[1]
    assert written.read_text() == text


@pytest.mark.parametrize("remember", [True, False])
def test_bench_keeps_its_verdict_where_it_is_to_be_remembered(models: Path, remember: bool) -> None:
    """That of composer's own choice."""
    said = ("--remember",) if remember else ()
    code, output = bench("own_models:make", "--chain", "onnxrt", "--seconds", "0.5", *said)
    assert code == 0, output
    listed = runner.invoke(app, ["cache", "list", "verdicts", "--json"])
    assert len(json.loads(listed.output)["entries"]) == int(remember)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_bench_says_that_a_file_which_names_code_has_to_be_pointed_at(models: Path) -> None:
    """Composer refuses such a file where it is only found."""
    code, output = bench("own_models:slow", "--chain", "own_models:quick", "--seconds", "0.5")
    assert code == 0, output
    assert "# COMPOSER_CONFIG or composer.configure has to name this file" in output


def test_an_engine_whose_low_precision_was_refused_is_not_wrong() -> None:
    """Under ``precision = "auto"`` that was tentative: it serves in fp32."""
    tried = attempt("aot_eager", Status.REJECTED, Reason.NUMERIC_MISMATCH, {})
    tried = [
        dataclasses.replace(tried, precision="bf16", tentative=True),
        attempt("aot_eager", Status.SUCCEEDED, None, {"verified": {"max_relative_error": 1e-7}}),
    ]
    compiled(torch.sin, "aot_eager")(torch.ones(2))
    graph = dataclasses.replace(last(), attempts=tuple(tried), chosen="aot_eager")
    standing = ranking.Standing("aot_eager", Candidate(backend="aot_eager"))
    found = standing.of_graphs([graph])
    assert (found.wrong, found.refusals, found.error) == (False, (), 1e-7)
    handed_back = attempt("aot_eager", Status.REJECTED, Reason.RETURNED_ORIGINAL, {})
    graph = dataclasses.replace(graph, attempts=(handed_back,), chosen="eager")
    assert not standing.of_graphs([graph]).wrong


def attempt(backend: str, status: Status, reason: Reason | None, engine: Any) -> Attempt:
    return Attempt(backend, status, reason, "why", 0.1, engine=engine)


def test_bench_that_cannot_write_prints_the_policy(models: Path) -> None:
    """It took long enough to measure."""
    asked = ("own_models:make", "--chain", "aot_eager", "--seconds", "0.2", "--write", "/dev/full")
    code, output = bench(*asked, "--force")
    assert code == 1
    assert "[[models]]" in output
    assert "'/dev/full' cannot be written: " in " ".join(output.split())


def test_bench_fits_a_terminal_of_80_columns(models: Path) -> None:
    """The table is narrow, since the reasons stand below it."""
    asked = ("own_models:make", "--chain", "aot_eager,own_models:broken", "--seconds", "0.5")
    code, output = bench(*asked, columns=80)
    assert code == 0, output
    table, below = output.split("own_models:broken: own_models:broken failed", maxsplit=1)
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    assert "the median of the rounds' ratios, not the ratio of the medians" in table
    assert "build" in below


def test_bench_times_training_where_the_module_trains(models: Path) -> None:
    """The factory in a script, with arguments by name; the policy fits any name of its module."""
    code, output = bench(
        str(models) + ":train", "--chain", "aot_eager", "--seconds", "0.5", "--json"
    )
    assert code == 0, output
    record = json.loads(output)
    assert record["training"]
    assert record["model"] == "own_models.Net"
    eager, engine, ours = record["standings"]
    assert (eager["label"], engine["label"], ours["label"]) == (EAGER, "aot_eager", COMPOSER)
    assert engine["served"] == {"aot_eager": 1}
    assert engine["max_relative_error"] == 0.0
    assert all(each["ms"] > 0 and each["eager_over_this"]["p25"] > 0 for each in (eager, engine))
    (rule,) = sources.read(tomllib.loads(record["policy"])).models
    assert rule.match.holds(Facts("__main__.Net", "cpu", "float32", True, False))
    assert not rule.match.holds(Facts("__main__.Net", "cpu", "float32", False, False))


@pytest.mark.parametrize("factory", ["bound", "outer"])
@pytest.mark.usefixtures("models")
def test_the_policy_matches_the_graphs_that_there_are(factory: str) -> None:
    """A graph is named for the frame that it is of, which need not be that of what was made."""
    asked = (f"own_models:{factory}", "--chain", "aot_eager", "--seconds", "0.2", "--json")
    code, output = bench(*asked)
    assert code == 0, output
    rules = sources.read(tomllib.loads(json.loads(output)["policy"])).models
    for name in {report.model for report in composer.reports()}:
        assert any(r.match.holds(Facts(name, "cpu", "float32", False, False)) for r in rules), name


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("own_models",), 2, "is not of the form MODULE:FACTORY"),
        (("no_such_module:make",), 2, "'no_such_module' cannot be imported"),
        (("own_models:absent",), 2, "'own_models' has no function 'absent'"),
        (("own_models:maek",), 2, "has no function 'maek'; did you mean 'make'?"),
        (("own_models:wrong",), 2, "cannot be called: missing a required argument: 'gm'"),
        (("own_models:NET",), 2, "'own_models:NET' is a model; name a function that returns"),
        (("own_models:nothing",), 2, "own_models:nothing gave a Net; it has to return (module,"),
        (("own_models:make", "--chain", "onxrt"), 2, "did you mean 'onnxrt'?"),
        (("own_models:make", "--chain", "a, {"), 2, "the chain is no TOML"),
        (("own_models:make", "--chain", "[aot_eager]"), 2, "the chain is no TOML"),
        (("own_models:make", "--chain", ",,"), 2, "the chain is empty"),
        (("own_models:make", "--chain", ""), 2, "the chain is empty"),
        (("own_models:make", "--chain", "[]"), 2, "the chain is empty"),
        (("own_models:make", "--chain", '["aot_eager", {}]'), 2, "chain"),
        (("own_models:make", "--chain", "eager"), 2, "names no engine beside eager"),
        (("own_models:make", "--write", "no/such/file"), 2, "there is no folder"),
        (("own_models:make", "--write", "."), 2, "'.' is a folder"),
        (("own_models:make", "--write", ".", "--force"), 2, "'.' is a folder"),
        (("own_models:make", "--seconds", "inf"), 2, "--seconds is inf: say how many"),
    ],
)
@pytest.mark.usefixtures("models")
def test_bench_says_what_is_wrong(arguments: tuple[str, ...], code: int, says: str) -> None:
    """With the target, what it returns, and the chain."""
    found, output = bench(*arguments)
    assert (found, says in " ".join(output.split())) == (code, True), output


def refused(file: Path, content: str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    """What is said of a mistake, before the factory is called; the file stays as it is."""
    file.with_name("composer.toml").write_text(content)
    file.write_text(f"{MODELS}\ndef never():\n    raise AssertionError\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = ("own_models:never", "--chain", "aot_eager", "--write", "composer.toml", "--force")
    code, output = bench(*asked)
    assert code == 2, output
    assert file.with_name("composer.toml").read_text() == content
    return " ".join(output.split())


def test_a_mistake_in_the_policy_is_no_fault_of_the_engines(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the command at once; that eager is the fastest does not follow."""
    typo = 'version = 1\n[defaults]\nchian = ["onnxrt"]\n'
    said = refused(models, typo, monkeypatch)
    assert "composer.toml: unknown option 'defaults.chian'; did you mean 'chain'?" in said
    right = "version = 1\n"
    assert "COMPOSER_STRICT is 'perhaps'" in refused(
        models, right, monkeypatch, COMPOSER_STRICT="perhaps"
    )
    monkeypatch.delenv("COMPOSER_STRICT")
    assert "policy file '/nosuch.toml' cannot be read" in refused(
        models, right, monkeypatch, COMPOSER_CONFIG="/nosuch.toml"
    )


def test_a_mistake_that_a_compile_finds_ends_the_bench(models: Path) -> None:
    """Such as a pass that nobody knows: it would stand for a failure of every engine."""
    content = '[[models]]\nmatch = {model = "own_models.*"}\npasses = ["fold_batchnorm"]\n'
    file = models.with_name("composer.toml")
    file.write_text(content)
    asked = ("own_models:make", "--chain", "aot_eager", "--write", "composer.toml", "--force")
    code, output = bench(*asked)
    said = "'fold_batchnorm'; did you mean 'fold_batch_norm'?"
    assert (code, said in " ".join(output.split())) == (2, True), output
    assert file.read_text() == content


def test_bench_reads_the_policy_that_the_module_of_the_factory_points_at(models: Path) -> None:
    """A file that names code holds where the program names it, and nowhere else."""
    models.with_name("composer.toml").write_text('[defaults]\nchain = ["own_models:quick"]\n')
    models.write_text(f"{MODELS}\nimport composer\ncomposer.configure('composer.toml')\n")
    try:
        code, output = bench("own_models:make", "--chain", "aot_eager", "--seconds", "0.2")
    finally:
        composer.configure(None)
    assert code == 0, output


def test_an_error_that_torch_wraps_is_told_by_what_it_wraps(models: Path) -> None:
    """Dynamo's first line says that a backend raised, and not what."""
    chain = '{backend = "aot_eager", when = {device = "nowhere"}}'
    models.with_name("composer.toml").write_text('[defaults]\non_exhausted = "raise"\n')
    _, output = bench("own_models:make", "--chain", chain)
    assert "BackendCompilerFailed" not in output
    assert "ChainExhausted: no candidate was accepted" in " ".join(output.split())


@pytest.mark.parametrize(
    "text", ["onnxrt, inductor", '"onnxrt", "inductor"', "['onnxrt', \"inductor\"]"]
)
def test_a_chain_may_be_spelled_as_in_a_file(text: str) -> None:
    """With its brackets or without."""
    assert bench_command._chain(text) == ["onnxrt", "inductor"]


@pytest.mark.parametrize(
    ("factory", "chain", "says"),
    [
        ("make", "nosuchengine", "no engine could be measured: nosuchengine unavailable (not_"),
        ("make", "own_models:broken,own_models:wrong", "own_models:broken failed (build_failed)"),
        ("make", "own_models:wrong", "own_models:wrong rejected (numeric_mismatch)"),
        ("opaque", "aot_eager", "torch.compile captured no graph of own_models.Opaque"),
    ],
)
def test_nothing_follows_where_no_engine_was_measured(
    models: Path, factory: str, chain: str, says: str
) -> None:
    """That eager is the fastest does not, and a file stays as it is."""
    file = models.with_name("policy.toml")
    file.write_text("version = 1\n")
    asked = (f"own_models:{factory}", "--chain", chain, "--seconds", "0.2")
    code, output = bench(*asked, "--write", str(file), "--force")
    assert (code, says in " ".join(output.split())) == (1, True), output
    assert "No engine is faster than eager" not in output
    assert file.read_text() == "version = 1\n"
    result = runner.invoke(app, ["bench", *asked, "--json"])
    assert (result.exit_code, json.loads(result.stdout)["policy"]) == (1, None)


@pytest.mark.slow
def test_json_is_all_that_bench_prints_on_stdout(models: Path) -> None:
    """What the user's code prints, and programs that it starts, goes to stderr."""
    models.write_text(f"{MODELS}\n{PRINTS}")
    command = [sys.executable, "-m", "composer", "bench", "own_models:prints", "--json"]
    path = os.pathsep.join(
        (str(Path(composer.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    )
    done = subprocess.run(
        [*command, "--chain", "aot_eager", "--seconds", "0.2"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "own_models.Prints"
    for said in ("imported", "from python", "from a program", "from C", "in forward"):
        assert said in done.stderr
    steps = [line for line in done.stderr.splitlines() if line.startswith("composer: ")]
    assert steps == [
        "composer: building aot_eager",
        "composer: building composer, fastest",
        "composer: timing, up to 0.2 s",
    ]


def test_an_error_of_the_models_shows_the_frames_of_the_models(models: Path) -> None:
    """Neither composer's nor those of torch that lead there."""
    models.write_text(f"{MODELS}\n{RAISES}")
    code, output = bench("own_models:raises")
    assert (code, "in forward\n    return self.inner(x)" in output) == (1, True), output
    head, _ = output.split("in forward", maxsplit=1)
    assert head.splitlines()[0].startswith("Traceback")
    assert head.splitlines()[1].startswith(f'  File "{models}", line ')
    assert output.splitlines()[-1] == "ValueError: no such size"


def test_a_slip_in_the_module_is_shown_where_it_stands(models: Path) -> None:
    """As Python does, without the frames of what imports it."""
    models.write_text("def make(:\n    pass\n")
    code, output = bench("own_models:make")
    assert code == 1
    assert output.startswith(f'  File "{models}", line 1\n    def make(:\n')
    assert output.splitlines()[-1].startswith("SyntaxError: ")


def test_an_import_that_fails_in_the_module_is_shown_where_it_stands(models: Path) -> None:
    """The module itself was found; what it imports was not."""
    models.write_text("import no_such_package_of_mine\n")
    code, output = bench("own_models:make")
    assert code == 1
    assert output.startswith("Traceback")
    assert f'File "{models}", line 1, in <module>' in output
    assert output.splitlines()[-1].startswith("ModuleNotFoundError: No module named 'no_such_pack")


def test_an_error_of_composers_own_is_shown_whole(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no frames but its own."""
    monkeypatch.setattr(bench_command, "rank", operator.not_)
    code, output = bench("own_models:make")
    assert (code, "in _ranked" in output, "TypeError: " in output) == (1, True, True)


def test_an_engine_that_strict_refused_serves_no_graph(models: Path) -> None:
    """The record of a compile that raised names nobody."""
    models.with_name("composer.toml").write_text("[defaults]\nstrict = true\n")
    asked = ("own_models:make", "--chain", "own_models:broken", "--seconds", "0.2", "--json")
    result = runner.invoke(app, ["bench", *asked])
    assert result.exit_code == 1
    assert [each["served"] for each in json.loads(result.stdout)["standings"]] == [{}, {}, {}]


def test_bench_refuses_a_chain_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be every candidate's."""
    monkeypatch.setenv("COMPOSER_CHAIN", "eager")
    code, output = bench("own_models:make")
    assert (code, "COMPOSER_CHAIN is set" in output) == (2, True)


def test_a_model_that_writes_to_its_inputs_is_refused() -> None:
    """Each of its calls would have other numbers."""
    subject = subject_of((lambda x: x.add_(1), torch.ones(2)), "here")
    with pytest.raises(RankingError, match="writes to its inputs"):
        rank(subject, ["aot_eager"])


def test_each_candidate_is_timed_whatever_the_policy_selects() -> None:
    """Under ``select = "fastest"`` eager would serve in the place of one that is slower."""
    subject = subject_of((torch.nn.Linear(2, 2), torch.ones(1, 2)), "here")
    with sources.using(select="fastest"):
        ranking = rank(subject, [FakeBackend("slow", at=1, seconds=0.005)], seconds=0.2)
    (slow,) = ranking.candidates
    assert slow.served == {"fake_slow": 1}
    assert slow.ms is not None
    assert slow.ms > 4


def test_inputs_are_one_argument_several_or_named() -> None:
    """A tensor, a tuple, a mapping; or args and kwargs apart."""
    x = torch.ones(1)
    given = [(x,), ((x, 2),), ({"x": x},), ((x,), {"y": 2})]
    subjects = [subject_of((torch.relu, *each), "make") for each in given]
    assert [each.args for each in subjects] == [(x,), (x, 2), (), (x,)]
    assert [each.kwargs for each in subjects] == [{}, {}, {"x": x}, {"y": 2}]
    with pytest.raises(OptionError, match="args is a tuple"):
        subject_of((torch.relu, x, {}), "make")


def standing(label: str, ms: float, options: dict[str, object] | None = None) -> Standing:
    """One that took so long in each of 20 rounds."""
    candidate = (
        None if label in (EAGER, COMPOSER) else Candidate(backend=label, options=options or {})
    )
    return Standing(label, candidate, 1, {label: 1}, 1.0, 0.0, (), False, (ms / 1e3,) * 20)


def policy(*found: Standing, served: dict[str, int]) -> dict[str, object]:
    """The rule that follows where eager takes 10 ms."""
    ours = Standing(COMPOSER, None, sum(served.values()), served)
    ranking = Ranking("my.Net", "cuda:0", False, (standing(EAGER, 10), *found, ours))
    (rule,) = advice.policy_of(ranking)["models"]
    return rule


def test_the_policy_has_the_quickest_first_and_none_slower_than_eager() -> None:
    """Options stand with their engine; the match says model, kind of device and mode."""
    freezing = standing("inductor", 2, {"freezing": True})
    rule = policy(standing("onnxrt", 4), freezing, standing("ts", 11), served={"inductor": 1})
    assert rule["chain"] == [{"backend": "inductor", "options": {"freezing": True}}, "onnxrt"]
    assert rule["select"] == "first"
    assert rule["match"] == {"model": "my.Net", "device": "cuda", "training": False}


def test_the_policy_keeps_all_that_a_candidate_was_measured_with() -> None:
    """Without its own least coverage, say, it would be declined."""
    given = Candidate(backend="onnxrt", min_coverage=0.1, when={"dtype": "float32"})
    measured = dataclasses.replace(standing("onnxrt", 4), candidate=given)
    (candidate,) = policy(measured, served={"onnxrt": 1})["chain"]
    assert Candidate.model_validate(candidate) == given


def test_the_policy_measures_where_the_bench_could_not_tell() -> None:
    """Two that are as fast, or graphs that want different engines."""
    close = policy(standing("onnxrt", 4), standing("inductor", 4.01), served={"onnxrt": 1})
    mixed = policy(standing("onnxrt", 4), served={"onnxrt": 1, "inductor": 2})
    alone = policy(standing("onnxrt", 12), served={"eager": 1})
    assert (close["select"], mixed["select"]) == ("fastest", "fastest")
    assert (alone["chain"], alone["select"]) == (["eager"], "first")


def of_turns(label: str, *ms: float) -> Standing:
    return dataclasses.replace(standing(label, 1), turns=tuple(each / 1e3 for each in ms))


def told(*found: Standing, under_load: bool = False) -> tuple[str, dict[str, Any]]:
    """The comments of the file that follows, and its rule."""
    ours = dataclasses.replace(found[0], label=COMPOSER, candidate=None, served={"onnxrt": 1})
    standings = (*found, ours)
    text = advice.text_of(Ranking("my.Net", "cpu", False, standings, under_load=under_load))
    return text, tomllib.loads(text)["models"][0]


def test_the_policy_measures_where_an_engine_is_not_surely_slower_than_eager() -> None:
    """By its mean it is; chance may have done that."""
    eager = of_turns(EAGER, *(10, 14, 10, 15, 10, 13, 11, 12, 10, 14))
    engine = of_turns("onnxrt", *(13, 11, 14, 10, 19, 10, 12, 11))
    text, rule = told(eager, engine)
    assert (rule["chain"], rule["select"]) == (["onnxrt"], "fastest")
    assert "No engine is faster than eager" not in text
    assert "# Undecided whether an engine is faster than eager" in text
    surely = of_turns("onnxrt", *(13, 16, 13, 17, 13, 16, 14, 15, 13, 16))
    text, rule = told(eager, surely)
    assert (rule["chain"], rule["select"]) == (["eager"], "first")
    assert "# left out: onnxrt: slower than eager: 14.5 ms a call" in text


def test_a_ratio_lies_within_its_quartiles() -> None:
    """It is the median of the ratios of the rounds; times are medians as well."""
    eager = of_turns(EAGER, *(10, 10, 10, 10, 10, 10, 12, 12))
    engine = of_turns("onnxrt", *(9, 9, 9, 9, 9, 9, 20, 20))
    text, _ = told(eager, engine)
    assert "# eager: 10 ms a call" in text
    assert "# onnxrt: 9 ms a call, 1.11 (0.98-1.11) times as fast as eager; undecided" in text


def test_few_rounds_decide_nothing() -> None:
    """The file says so, gives no spread, and leaves every engine to each process's measurement."""
    eager, quick = of_turns(EAGER, 50, 50), of_turns("onnxrt", 1, 1)
    text, rule = told(eager, quick)
    assert "# There was no time for 7 rounds of each" in text
    assert "# onnxrt: 1 ms a call, about 50 times as fast as eager" in text
    assert (rule["chain"], rule["select"]) == (["onnxrt"], "fastest")
    _, rule = told(of_turns(EAGER, 1, 1), of_turns("onnxrt", 50, 50))
    assert (rule["chain"], rule["select"]) == (["onnxrt"], "fastest")


def test_figures_of_a_busy_machine_decide_nothing() -> None:
    """However clear they look."""
    eager, quick = of_turns(EAGER, *[50] * 9), of_turns("onnxrt", *[1] * 9)
    assert told(eager, quick)[1]["select"] == "first"
    text, rule = told(eager, quick, under_load=True)
    assert "# Other programs were using the cores: measure again" in text
    assert rule["select"] == "fastest"


def test_bench_says_that_the_machine_was_busy(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table, in JSON, and in what it writes."""
    measure = ranking.select.measure

    def under_load(*args: Any) -> Any:
        return dataclasses.replace(measure(*args), under_load=True)

    monkeypatch.setattr(ranking.select, "measure", under_load)
    asked = ("own_models:slow", "--chain", "own_models:quick", "--seconds", "0.3")
    _, output = bench(*asked, "--json")
    said = "Other programs were using the cores: measure again"
    assert json.loads(output)["under_load"]
    assert said in json.loads(output)["policy"]
    written = models.with_name("policy.toml")
    code, output = bench(*asked, "--write", str(written))
    assert (code, said in output, said in written.read_text()) == (0, True, True)
