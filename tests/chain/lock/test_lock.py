"""``composer lock``, its ``--check``, and ``locked``: the same engine for the same graph."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from common import compiled, last
from forked import Interpreter
from locks import LOCK, cosine, differences, edit, lock, locked_for, program, refused, run
from rewrites import CosineToSine, Scale
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer import session
from composer.chain.lock.observed import lock_of, observing
from composer.graphs import capture, keys
from composer.knowledge import lock_file
from composer.knowledge.chosen import readable
from composer.knowledge.facts import Fact, Knowledge, Known
from composer.knowledge.failure import Failure
from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.quarantine import Quarantined
from composer.knowledge.self_test import SelfTest
from composer.knowledge.verdict import Verdict
from composer.testing import FakeBackend

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")


def test_lock_says_what_serves_each_graph_and_what_the_graph_is() -> None:
    """By model and position; with versions, passes, what the policy decides, and the parts."""
    composer.passes.register(Scale)
    chain = [{"backend": "aot_eager", "when": {"training": False}}, "eager"]
    program(chain=chain, passes=[{"pass": "scale", "factor": 3.0}])
    done = run("lock", "script.py")
    assert done.stdout == f"{LOCK.absolute()}: 1 graph, served by: aot_eager 1\n"
    assert LOCK.read_text().startswith("# Written by `composer lock script.py`")
    table = tomllib.loads(LOCK.read_text())
    assert table["versions"]["torch"] == torch.__version__
    (graph,) = table["graphs"]
    assert (graph["model"], graph["position"], graph["engine"]) == ("__main__.f", 0, "aot_eager")
    assert graph["key"] == last().graph_key
    assert (graph["nodes"], graph["inputs"]) == (2, ["l_x_: float32[4] on cpu"])
    (scale,) = graph["passes"]
    assert (scale["name"], scale["parameters"]) == ("scale", {"factor": 3.0})
    assert len(scale["fingerprint"]) == 16
    assert graph["policy"] == {"chain": chain}
    parts = ("surroundings", "inputs", "weights", "operations", "mode", "policy", "passes")
    assert tuple(graph["parts"]) == parts


def test_lock_is_the_same_bytes_in_another_process(interpreter: Interpreter) -> None:
    """Nothing of a process, a clock or a folder is in it."""
    program(passes=["fold_constants"], chain=[{"backend": "tensorrt", "when": {"dtype": "no"}}])
    lock()
    before = LOCK.read_bytes()
    LOCK.unlink()
    done = interpreter.run(["-m", "composer", "lock", "script.py"])
    assert done.returncode == 0, done.stderr
    assert LOCK.read_bytes() == before
    assert differences() == []


def test_assert_names_the_engine_that_went_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who serves the graph instead, and why not the one that did."""
    program("with torch.no_grad(): compiled(torch.ones(4))", chain=["onnxrt", "aot_eager"])
    table = lock()
    assert table["graphs"][0]["engine"] == "onnxrt"
    assert table["versions"]["onnxruntime"]
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name)
    )
    monkeypatch.delitem(sys.modules, "onnxscript", raising=False)
    (told,) = differences()
    assert told.startswith(
        "graph 0 of __main__.f: served by aot_eager; the lock says onnxrt: "
        "onnxrt was unavailable (not_installed): onnxscript not installed"
    )


def test_assert_names_a_changed_pass_parameter() -> None:
    """Before and after; also a pass that came, and one whose source is another."""
    composer.passes.register(CosineToSine)
    composer.passes.register(Scale)
    policy = Path("composer.toml")
    told = "[defaults]\nchain = ['aot_eager']\npasses = [{ pass = 'scale', factor = 2.5 }]\n"
    policy.write_text(told)
    program()
    lock()
    policy.write_text(told.replace("2.5", "3.5"))
    title = "graph 0 of __main__.f"
    assert differences() == [f"{title}: passes changed: scale(factor=2.5) -> scale(factor=3.5)"]
    policy.write_text(told.replace("[{", "['cosine_to_sine', {"))
    now = "cosine_to_sine, scale(factor=2.5)"
    assert differences() == [f"{title}: passes changed: scale(factor=2.5) -> {now}"]
    policy.write_text(told)
    edit(lambda table: table["graphs"][0]["passes"][0].update(fingerprint="0" * 16))
    edit(lambda table: table["graphs"][0]["parts"].update(passes="0" * 16))
    assert differences() == [f"{title}: passes changed: the source of scale"]


def test_assert_names_another_torch() -> None:
    """And any other package that the engines of the chain are made of."""
    program(chain=["aot_eager", "tensorrt"])
    lock()
    packages = {"torch": "2.12.0", "tensorrt": "1.0", "no-such-package": "1.0"}
    edit(lambda table: table["versions"].update(packages))
    assert differences() == [
        f"torch 2.12.0 in the lock, {torch.__version__} here",
        "tensorrt 1.0 in the lock, not installed here",
    ]


def test_assert_names_graphs_that_are_new_gone_or_changed() -> None:
    """One that changed is the one at its place among those of its model."""
    lines = [
        "compiled(torch.ones(4))",
        "g = torch.compile(lambda x: x * 2, backend='composer', options={'chain': ['eager']})",
        "g(torch.ones(3))",
    ]
    program(*lines, chain=["eager"])
    assert len(lock()["graphs"]) == 2
    program("compiled(torch.ones(4, 2))", "compiled(torch.ones(4, 2).double())", chain=["eager"])
    changed, new, gone = differences()
    what = "l_x_: float32[4] on cpu -> l_x_: float32[4, 2] on cpu"
    assert changed == f"graph 0 of __main__.f: inputs changed: {what}"
    assert new == "graph 1 of __main__.f: new; the lock does not hold it"
    assert gone == (
        "graph 0 of __main__.<lambda>: gone; the lock holds it, and it was not compiled"
    )


def test_assert_sees_an_engine_that_failed_at_a_call() -> None:
    """What counts is who serves when the script is over."""
    call = "for _ in range(3): compiled(torch.ones(4))"
    engine = "compiled = torch.compile(f, backend='composer', options={'chain': ["
    program(f"{engine}FakeBackend(name='vendor'), 'eager']}})", call)
    lock()
    program(f"{engine}FakeBackend('raises', at=2, name='vendor'), 'eager']}})", call)
    (told,) = differences()
    assert "served by eager; the lock says vendor: vendor was failed (raised_at_runtime)" in told


def test_lock_has_the_options_of_the_place_that_serves_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name may stand in a chain more than once, and be tried again behind its end."""
    Path("flaky.py").write_text(
        "from composer.testing import FakeBackend\n"
        "made = []\n"
        "def engine(gm, inputs, *, options):\n"
        "    made.append(options['n'])\n"
        "    how = FakeBackend('raises', at=2) if len(made) == 1 else FakeBackend()\n"
        "    return how(gm, inputs)\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "flaky", raising=False)
    chain = [{"backend": "flaky:engine", "options": {"n": n}} for n in (1, 2)]
    call = "for _ in range(9): compiled(torch.ones(4))"
    program(
        call,
        "import flaky",
        "assert flaky.made == [1, 2, 1]",
        chain=chain,
        on_runtime_error={"retry_after": 2},
    )
    (graph,) = lock()["graphs"]
    assert (graph["engine"], graph["options"]) == ("flaky:engine", {"n": 1})


def test_assert_sees_the_few_compiles_that_another_serves() -> None:
    """Of a graph that is compiled twice, as for two modules of one class."""
    twice = ["for chain in CHAINS:", "    torch.compiler.reset()"]
    twice += ["    torch.compile(f, backend='composer', options={'chain': chain})(torch.ones(4))"]
    engine = "fake = FakeBackend(name='vendor')"
    program(engine, "CHAINS = [[fake, 'eager']] * 3", *twice)
    lock()
    fails = "CHAINS[1] = [FakeBackend('returns_none', name='vendor'), 'eager']"
    program(engine, "CHAINS = [[fake, 'eager']] * 3", fails, *twice)
    (told,) = differences()
    assert told.endswith("served by eager in 1 of 3 compiles; the lock says vendor")
    done = run("lock", "script.py")
    assert "served by eager in 1 of 3 compiles; composer.lock says vendor" in done.stderr


def test_assert_speaks_json() -> None:
    """One line, the last: the file, whether all is the same, each difference with its kind."""
    program(chain=["aot_eager"])
    lock()
    program(chain=["eager"])
    done = run("lock", "--check", "--json", "script.py")
    assert done.exit_code == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["file"], found["same"]) == (str(LOCK.absolute()), False)
    policy, engine = found["differences"]
    assert policy == {
        "graph": "graph 0 of __main__.f",
        "kind": "policy",
        "message": "policy changed: chain = ['aot_eager'] -> ['eager']",
    }
    assert (engine["kind"], engine["message"]) == (
        "engine",
        "served by eager; the lock says aot_eager, which was not tried",
    )
    written = json.loads(run("lock", "--json", "script.py").stdout.splitlines()[-1])
    assert written["graphs"][0]["engine"] == "eager"


def test_check_fails_where_the_script_does() -> None:
    """The list of differences comes all the same."""
    program(chain=["eager"])
    lock()
    program("import sys", "sys.exit(3)")
    done = run("lock", "--check", "script.py")
    assert done.exit_code == 1
    assert "the script ended with exit code 3" in done.stderr
    assert "gone; the lock holds it" in done.stdout


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("import sys; sys.exit(4)", 1, "the script ended with exit code 4; composer.lock is as"),
        ("pass", 1, "nothing was compiled through composer"),
        (
            "torch._dynamo.config.suppress_errors = True\ntry: compiled(torch.ones(4))\n"
            "finally: torch._dynamo.config.suppress_errors = False",
            1,
            "graph 0 of __main__.f is served by nobody",
        ),
    ],
)
def test_lock_writes_nothing_that_would_not_hold(line: str, code: int, said: str) -> None:
    """A script that failed, or compiled nothing, or has a graph without an engine."""
    program(line, chain=["tensorrt"], on_exhausted="raise")
    done = run("lock", "script.py")
    assert (done.exit_code, LOCK.exists()) == (code, False)
    assert said in done.stderr


def test_lock_leaves_a_file_of_somebody_elses() -> None:
    """PHP's Composer has one of that name; the script is not even run."""
    LOCK.write_text('{ "_readme": [] }\n')
    program("raise SystemExit(9)")
    done = run("lock", "script.py")
    assert (done.exit_code, LOCK.read_text()) == (2, '{ "_readme": [] }\n')
    assert "was not written by composer" in done.stderr
    assert "there is no folder" in run("lock", "--lock", "no/such.lock", "script.py").stderr


@pytest.mark.parametrize(("switch", "value"), [("CHAIN", "eager"), ("DISABLE", "1")])
def test_lock_holds_nothing_that_is_of_the_night(
    switch: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a switch for whoever is on call the script is not even run."""
    program("raise SystemExit(9)")
    monkeypatch.setenv(f"COMPOSER_{switch}", value)
    done = run("lock", "script.py")
    assert (done.exit_code, LOCK.exists()) == (2, False)
    assert f"COMPOSER_{switch} is set" in done.stderr
    monkeypatch.setenv(f"COMPOSER_{switch}", "")
    assert "the script ended with exit code 9" in run("lock", "script.py").stderr


@pytest.mark.parametrize("is_there", [True, False])
def test_lock_that_is_a_link_stays_one(is_there: bool) -> None:
    """What it leads to is written."""
    Path("locks").mkdir()
    program(chain=["eager"])
    if is_there:
        assert run("lock", "--lock", "locks/real.lock", "script.py").exit_code == 0
    LOCK.symlink_to("locks/real.lock")
    lock()
    assert LOCK.is_symlink()
    assert lock_file.read(Path("locks/real.lock")).graphs[0].engine == "eager"
    assert [each.name for each in Path("locks").iterdir()] == ["real.lock"]


def test_lock_that_is_a_link_to_no_folder_is_found_first() -> None:
    """Before the script is run."""
    Path("script.py").write_text("raise SystemExit('it was run')")
    LOCK.symlink_to("nowhere/real.lock")
    done = run("lock", "script.py")
    assert done.exit_code == 2
    assert "nowhere" in done.output


def test_one_of_several_ranks_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first; the others run the script and leave the file to it."""
    program(chain=["eager"])
    monkeypatch.setenv("RANK", "1")
    assert (run("lock", "script.py").exit_code, LOCK.exists()) == (0, False)
    assert last().chosen == "eager"
    monkeypatch.setenv("RANK", "0")
    assert lock()["graphs"][0]["engine"] == "eager"


def test_assert_without_a_lock_runs_nothing() -> None:
    """Exit code 2, and the file's name."""
    program("raise SystemExit(9)")
    done = run("lock", "--check", "script.py")
    assert done.exit_code == 2
    assert f"lock file '{LOCK.absolute()}' cannot be read: No such file" in done.stderr


def test_an_engine_that_changes_its_options_is_locked_with_those_of_the_chain() -> None:
    """They are read before the engine is built."""

    def engine(gm: torch.fx.GraphModule, _: list[Any], options: dict[str, Any]) -> Any:
        options["sizes"].clear()
        return FakeBackend()(gm, _)

    with observing() as observed:
        compiled(cosine, {"backend": engine, "options": {"sizes": {"x": 1}}})(torch.ones(4))
    (graph,) = lock_of(observed.served()).graphs
    assert graph.options == {"sizes": {"x": 1}}


def test_locked_engine_is_the_only_one_tried() -> None:
    """The others are skipped, with a word on the lock; nothing is measured."""
    first, second = FakeBackend(name="first"), FakeBackend(name="second")
    options = {"chain": [first, second, "aot_eager"], "select": "fastest"}
    locked_for(**options)
    edit(lambda table: table["graphs"][0].update(engine="second"))
    made = first.compiles, second.compiles
    x = torch.ones(4)
    torch.testing.assert_close(compiled(cosine, locked=True, **options)(x), cosine(x))
    assert (first.compiles - made[0], second.compiles - made[1]) == (0, 1)
    assert last().chosen == "second"
    skipped, serves = last().attempts
    assert (skipped.status, skipped.reason) == ("skipped", "policy")
    assert skipped.message == "composer.lock says second for this graph"
    assert "timing" not in serves.engine


def test_locked_engine_is_told_from_another_by_its_options() -> None:
    """A name may stand in a chain more than once."""

    def vendor(gm: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Any:
        if options["level"] == unfit:
            raise RuntimeError("no such level")
        return FakeBackend()(gm, inputs)

    chain = [{"backend": vendor, "options": {"level": level}} for level in (1, 2)]
    unfit = 1
    locked_for(chain=chain)
    (graph,) = tomllib.loads(LOCK.read_text())["graphs"]
    assert (graph["engine"], graph["options"]) == ("vendor", {"level": 2})
    unfit = 0
    compiled(cosine, locked=True, chain=chain)(torch.ones(4))
    assert [each.status for each in last().attempts] == ["skipped", "succeeded"]
    assert last().attempts[0].message == "composer.lock says vendor(level=2) for this graph"


@pytest.mark.parametrize("strict", [False, True])
def test_locked_floor_serves_without_a_place_in_the_chain(strict: bool) -> None:
    """Eager may be the fastest of all, also where nobody else may be missed."""
    chain = ["aot_eager"]
    locked_for(chain=chain)
    edit(lambda table: table["graphs"][0].update(engine="eager"))
    compiled(cosine, locked=True, chain=chain, on_exhausted="raise", strict=strict)(torch.ones(4))
    assert last().chosen == "eager"
    assert [each.status for each in last().attempts] == ["skipped", "succeeded"]


def test_locked_engine_that_fails_leaves_the_floor() -> None:
    """As always: recorded, and an error where the policy asks for one."""
    locked_for(chain=[FakeBackend(name="vendor"), "aot_eager"])
    chain = [FakeBackend("raises", name="vendor"), "aot_eager"]
    compiled(cosine, locked=True, chain=chain)(torch.ones(4))
    assert last().chosen == "eager"
    assert [each.reason for each in last().attempts] == ["build_failed", "policy"]
    torch.compiler.reset()
    with pytest.raises(BackendCompilerFailed, match="no candidate was accepted"):
        compiled(cosine, locked=True, chain=chain, on_exhausted="raise")(torch.ones(4))


def test_graph_that_is_not_as_the_lock_says_is_the_users_error() -> None:
    """At once, with every difference."""
    composer.passes.register(Scale)
    locked_for(chain=["aot_eager"])
    edit(lambda table: table["versions"].update(torch="2.12.0"))
    version = f"torch 2.12.0 in the lock, {torch.__version__} here"
    title = f"graph 0 of {cosine.__module__}.cosine"
    composer.reset()
    error = refused(chain=["aot_eager"])
    assert error.differences == (version,)
    assert f"holds {title} as another than it is here: torch" in str(error)
    error = refused(torch.ones(5), chain=["eager"], verify="compile", passes=["scale"])
    assert error.differences == (
        "inputs changed: l_x_: float32[4] on cpu -> l_x_: float32[5] on cpu",
        "policy changed: chain = ['aot_eager'] -> ['eager']; verify = the default -> compile",
        "passes changed: none -> scale(factor=2.0)",
        version,
    )


def test_graph_that_the_lock_does_not_hold_is_an_error() -> None:
    """One more of a model is compared with the nearest; a model may be unknown altogether."""
    locked_for(chain=["eager"])
    f = compiled(cosine, chain=["eager"], locked=True)
    f(torch.ones(4))
    nearest = r"does not hold graph 1 of \S+cosine; the nearest is graph 0: inputs changed: "
    with pytest.raises(BackendCompilerFailed, match=nearest):
        f(torch.ones(4, dtype=torch.float64))
    unknown = r"does not hold graph 0 of mine, nor any other of it\."
    with pytest.raises(BackendCompilerFailed, match=unknown):
        compiled(torch.sin, chain=["eager"], locked=True, model="mine")(torch.ones(4))


def test_position_of_a_graph_counts_all_that_were_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever reports are kept, whatever was reset, and whoever is compiled again."""
    locked_for(chain=["eager"])
    monkeypatch.setattr(session, "KEPT_REPORTS", 1)
    composer.reset()
    f = compiled(cosine, dynamic=False, chain=["eager"])
    for size in (4, 5, 6, 4):
        f(torch.ones(size, size))
    composer.reset()
    torch.compiler.reset()
    locked = compiled(cosine, dynamic=False, chain=["eager"], locked=True)
    for size, position in ((7, 4), (5, 2), (7, 4)):
        with pytest.raises(BackendCompilerFailed, match=f"does not hold graph {position} of"):
            locked(torch.ones(size, size))
        torch.compiler.reset()


def test_positions_of_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that compiles a model without end has so many numbers, and no more."""
    monkeypatch.setattr(session, "KEPT_POSITIONS", 2)
    f = compiled(cosine, dynamic=False, chain=["eager"])
    for size in (4, 5, 6, 7):
        f(torch.ones(size, 3))
    assert len(session.current().positions[last().model]) == 2
    assert session.current().position(last().model, "another") == 2


def test_lock_names_no_code() -> None:
    """An engine that is not in the chain is refused by its name alone."""
    locked_for(chain=["eager"])
    edit(lambda table: table["graphs"][0].update(engine="stranger:backend"))
    (told,) = refused(chain=["eager"]).differences
    assert told == "stranger:backend, which it names, is not in the chain"
    assert "stranger" not in sys.modules


def twice(table: dict[str, Any]) -> None:
    table["graphs"].append(dict(table["graphs"][0], engine="aot_eager"))


def at_another_place(table: dict[str, Any]) -> None:
    table["graphs"].append(dict(table["graphs"][0], position=1))


def at_one_place(table: dict[str, Any]) -> None:
    first = table["graphs"][0]
    table["graphs"].append(dict(first, parts=first["parts"] | {"mode": "another"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (twice, r"graph 0 of \S+cosine stands there twice \(served by eager, and by aot_eager\)"),
        (at_another_place, r"graph 1 of \S+cosine is the same as graph 0 of \S+cosine"),
        (
            at_one_place,
            r"graph 0 of \S+cosine stands there twice \(served by eager, and by eager\)",
        ),
        (lambda t: t.update(version=True), "option 'version' is True: the version"),
        (lambda t: t.update(version=1.0), "option 'version' is 1.0: the version"),
        (
            lambda t: t["graphs"][0].update(training="yes"),
            r"option 'graphs\[0\].training' is 'yes'",
        ),
        (lambda t: t["graphs"][0].update(engine=""), r"graph 0 of \S+cosine has no engine"),
    ],
)
def test_lock_that_was_merged_or_edited_wrongly_is_malformed(change: Any, said: str) -> None:
    """Nobody can tell which of two entries holds."""
    locked_for(chain=["eager"])
    edit(change)
    assert re.search(f"is malformed: {said}", str(refused(chain=["eager"])))


def test_lock_may_begin_with_a_byte_order_mark() -> None:
    """As some editors write it, and a policy file may, too."""
    locked_for(chain=["eager"])
    LOCK.write_text(LOCK.read_text(), encoding="utf-8-sig")
    torch.compiler.reset()
    compiled(cosine, chain=["eager"], locked=True)(torch.ones(4))
    assert last().chosen == "eager"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("[versions\n", "cannot be read"),
        ("", "is malformed: option 'version' is missing; option 'versions' is missing; opt"),
        ("version = 2\nversions = {}\ngraphs = []\n", "malformed: option 'version' is 2: Input"),
        (
            "version = 1\nversions = {}\n[[graphs]]\nengin = 'eager'\n",
            "unknown option 'graphs[0].engin'; did you mean 'engine'? (accepted: model, position,",
        ),
        (
            "version = 1\nversions = {}\ngraphs = []\ngraph = 1\n",
            "unknown option 'graph'; did you mean",
        ),
    ],
)
def test_missing_or_malformed_lock_is_an_error_that_names_it(text: str | None, said: str) -> None:
    """File, key, and what is nearest."""
    if text is not None:
        LOCK.write_text(text)
    error = refused(chain=["eager"])
    assert str(error).startswith(f"lock file '{LOCK.absolute()}' ")
    assert said in str(error)


TABLE = "[defaults]\nchain = ['aot_eager']\nlocked = true\n"


@pytest.mark.parametrize("source", ["composer.toml", "pyproject.toml", "environment", "configure"])
def test_lock_lies_beside_the_policy_file(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the policy comes from; else in the working directory."""
    locked_for(chain=["aot_eager"])
    if source in ("environment", "configure"):
        folder = Path("elsewhere")
        folder.mkdir()
        policy = folder / "policy.toml"
        policy.write_text(TABLE)
        LOCK.rename(folder / LOCK.name)
        if source == "configure":
            composer.configure(policy)
        else:
            monkeypatch.setenv("COMPOSER_CONFIG", str(policy))
    else:
        table = TABLE.replace("[defaults]", "[tool.composer.defaults]")
        Path(source).write_text(table if source == "pyproject.toml" else TABLE)
    compiled(cosine)(torch.ones(4))
    assert last().chosen == "aot_eager"
    with pytest.raises(BackendCompilerFailed, match="LockError"):
        compiled(cosine)(torch.ones(5))


def test_switches_on_call_go_over_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes an engine away in the night has no lock file to renew."""
    monkeypatch.setenv("COMPOSER_CHAIN", "aot_eager")
    compiled(cosine, locked=True)(torch.ones(4))
    assert last().chosen == "aot_eager"
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    torch.compiler.reset()
    compiled(cosine, locked=True)(torch.ones(4))
    assert last().chosen == "eager"
    monkeypatch.delenv("COMPOSER_DISABLE")
    monkeypatch.delenv("COMPOSER_CHAIN")
    monkeypatch.setenv("COMPOSER_SELECT", "first")
    torch.compiler.reset()
    compiled(cosine, "eager", locked=True, select="fastest")(torch.ones(4))
    assert last().chosen == "eager"


def test_lock_and_assert_go_over_a_locked_policy() -> None:
    """The one writes the lock anew; under the other what is the same is held to it."""
    Path("composer.toml").write_text(TABLE.replace("['aot_eager']", "['aot_eager', 'eager']"))
    program()
    assert lock()["graphs"][0]["engine"] == "aot_eager"
    edit(lambda table: table["graphs"][0].update(engine="eager"))
    assert differences() == []
    program("compiled(torch.ones(6))")
    changed, moved = differences()
    assert "inputs changed" in changed
    assert "served by aot_eager; the lock says eager" in moved


def test_graph_is_the_same_however_refusals_are_answered() -> None:
    """And one whose compile came to no end is none."""

    def raises(gm: torch.fx.GraphModule) -> None:
        raise RuntimeError("mine")

    broken = {"passes": [raises], "on_pass_error": "raise"}
    with observing() as observed:
        for how in ({}, {"strict": True}, {"on_exhausted": "raise"}):
            torch.compiler.reset()
            compiled(cosine, "eager", **how)(torch.ones(4))
        with pytest.raises(BackendCompilerFailed, match="mine"):
            compiled(torch.sin, "eager", **broken)(torch.ones(4))
    assert len({each.graph_key for each in composer.reports()}) == 3
    titles = [each.chosen.title for each in observed.served()]
    assert titles == [f"graph 0 of {cosine.__module__}.cosine"]


def test_check_of_a_lock_that_names_eager_for_a_chain_without_it() -> None:
    """Eager is added to the chain while the program runs, and serves as the file says."""
    Path("composer.toml").write_text(TABLE)
    program()
    lock()
    edit(lambda table: table["graphs"][0].update(engine="eager"))
    assert differences() == []
    assert last().chosen == "eager"


def test_search_for_a_culprit_asks_no_lock() -> None:
    """It compiles graphs that no lock holds."""
    composer.configure({"defaults": {"locked": True}})
    assert composer.passes.bisect(cosine, [torch.ones(4)], passes=["fold_constants"]) is None


def describes(**how: Any) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Key, parts and inputs of one compile."""
    fn, x = how.pop("fn", cosine), how.pop("x", torch.ones(4))
    torch.compiler.reset()
    with observing() as observed:
        compiled(fn, "eager", **how)(x)
    graph = observed.served()[-1].chosen
    return graph.key, graph.parts, graph.inputs


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ({}, set()),
        ({"x": torch.ones(4).requires_grad_()}, {"inputs"}),
        ({"x": torch.ones(2, 2)}, {"inputs"}),
        ({"fn": lambda x: torch.sin(x) + 1}, {"operations"}),
        ({"passes": ["fold_constants"]}, {"passes"}),
        ({"verify": "compile"}, {"policy"}),
        ({"select": {"seconds": 1.0}}, set()),
    ],
)
def test_parts_differ_where_the_key_does(how: dict[str, Any], parts: set[str]) -> None:
    """And say in what."""
    key, before, _ = describes()
    other, after, _ = describes(**how)
    assert {name for name in before if before[name] != after[name]} == parts
    assert (key == other) == (not parts)


def test_surroundings_and_weights_are_parts() -> None:
    """Grad mode, and a layer that has another dtype."""
    layer = torch.nn.Linear(4, 4)
    _, before, _ = describes(fn=layer)
    with torch.no_grad():
        _, after, _ = describes(fn=layer)
    assert {name for name in before if before[name] != after[name]} == {"surroundings"}
    _, after, _ = describes(fn=layer.requires_grad_(False))
    assert {name for name in before if before[name] != after[name]} == {"weights"}


def test_symbols_are_known_by_their_position() -> None:
    """Their names are torch's own, and change with what was compiled before."""
    _, _, inputs = describes(dynamic=True)
    assert inputs == ("sym0: symbol", "l_x_: float32[sym0] on cpu")


def test_parts_are_the_same_on_every_rank() -> None:
    """Where the keys differ by the number of the device."""
    parts = []
    for device in ("cuda:0", "cuda:1"):
        graph = torch.fx.Graph()
        made = graph.call_function(torch.ones, (2,), {"device": torch.device(device)})
        graph.output((made,))
        gm = torch.fx.GraphModule(torch.nn.Module(), graph)
        request = capture.read_request(gm, [])
        parts.append((keys.graph_key(gm), keys.parts_of(request, {"mode": "None"})))
    (key, mine), (other, theirs) = parts
    assert key != other
    assert mine == theirs


def test_what_the_lock_shows_is_equal_in_every_process() -> None:
    """Sets are sorted, objects have no address, functions go by their name; TOML can hold it."""
    value = {"b": {"y", "x"}, "a": None, "c": object(), "d": cosine, "e": torch.float16, "f": (1,)}
    assert readable(value) == {
        "a": "None",
        "b": ["x", "y"],
        "c": "<object object>",
        "d": f"{cosine.__module__}.cosine",
        "e": "torch.float16",
        "f": [1],
    }


FACTS: dict[str, tuple[type[Fact], Fact]] = {
    "known_failure": (
        Failure,
        Failure.model_construct(
            status="crashed", reason="crashed", message="signal 11", error_type="", traceback=""
        ),
    ),
    "quarantined": (Quarantined, Quarantined(in_chain="onnxrt")),
    "engine_incompatible": (SelfTest, SelfTest(backend="onnxrt", why="it fails the test")),
}
"""By the reason that the record gives: a kind of fact, and one such fact."""


@pytest.mark.parametrize("reason", FACTS)
def test_a_fact_bars_the_locked_engine_and_brings_no_other(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager answers then, since the lock says who else might."""
    options = {"chain": ["onnxrt", "aot_eager"]}
    locked_for(**options)
    usual = Knowledge.recall
    kind, fact = FACTS[reason]

    def recall(
        self: Knowledge, asked: Any, fingerprint: Fingerprint, settings: Any, **only: Any
    ) -> Any:
        is_it = asked is kind and fingerprint.candidates[0].name == "onnxrt"
        return Known(fact) if is_it else usual(self, asked, fingerprint, settings, **only)

    monkeypatch.setattr(Knowledge, "recall", recall)
    compiled(cosine, locked=True, **options)(torch.ones(4))
    assert last().chosen == "eager"
    assert [each.reason for each in last().attempts] == [reason, "policy"]


def test_the_lock_goes_over_a_verdict() -> None:
    """What the file says serves, whichever engine was measured to be the fastest."""

    def engine(name: str) -> Any:
        def vendor(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            return lambda x: [torch.cos(x) + 1]

        vendor.__name__ = name
        vendor.uuid = lambda: name  # type: ignore[attr-defined]
        return vendor

    options = {"chain": [engine("first"), engine("second")], "select": "fastest"}
    locked_for(**options)
    assert Verdict.cache().entries()
    other = "first" if last().chosen == "second" else "second"
    edit(lambda table: table["graphs"][0].update(engine=other))
    x = torch.ones(4)
    torch.testing.assert_close(compiled(cosine, locked=True, **options)(x), cosine(x))
    assert last().chosen == other


def test_a_float_that_is_no_input_in_the_end_is_none_in_the_lock() -> None:
    """With ``dynamic`` the first capture of a graph has it as an input, and AOTAutograd asks again.

    The lock has the second capture. So under ``locked`` the first is none that it does not know.
    """
    lines = ("def f(x, s=0.5):", "    return torch.nn.functional.elu(x, s)")
    call = 'torch.compile(f, backend="composer", dynamic=True, options=OPTIONS)(torch.ones(4))'
    program(*lines, call.replace("OPTIONS", str({"chain": ["aot_eager"]})))
    (graph,) = lock()["graphs"]
    assert not [each for each in graph["inputs"] if "float64" in each]
    for value in ("raise", "warn"):
        chain = {"chain": ["aot_eager"], "locked": value}
        program(*lines, call.replace("OPTIONS", str(chain)))
        done = run("run", "script.py")
        assert done.exit_code == 0, done.output
        assert last().lock is not None
        assert (last().chosen, last().lock.unlocked) == ("aot_eager", "")


def test_a_float_that_varies_stays_an_input_where_the_lock_knows_nothing_of_it() -> None:
    """Else each of its values would be another graph under ``locked = "warn"``."""
    locked_for(chain=["eager"])
    options = {"chain": ["eager"], "locked": "warn"}
    elu = torch.nn.functional.elu
    run = torch.compile(lambda x, s: elu(x, s), backend="composer", dynamic=True, options=options)
    before = len(composer.reports())
    for value in (0.5, 0.25, 0.125):
        assert torch.equal(run(-torch.ones(4), value), elu(-torch.ones(4), value))
    assert len(composer.reports()) == before + 1
