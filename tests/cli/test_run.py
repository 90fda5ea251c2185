"""``composer run``: a script runs as Python runs it, then the report."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from forked import Interpreter
from typer.testing import CliRunner

from composer.cli import app

COMPILES = """
import torch

def honest(gm, example_inputs):
    return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

@torch.compile(backend="composer", options={"chain": [honest]})
def f(x):
    return torch.sin(x)

f(torch.ones(3))
"""


def python(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **kwargs,
    )


@pytest.fixture
def composer(interpreter: Interpreter) -> Any:
    """Runs the command."""

    def run(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return interpreter.run(["-m", "composer", *map(str, args)], **kwargs)

    return run


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Writes a script, in a folder of its own."""

    def write(code: str, name: str = "script.py") -> Path:
        folder = tmp_path / "scripts"
        folder.mkdir(exist_ok=True)
        file = folder / name
        file.write_text(textwrap.dedent(code))
        return file

    return write


def test_report_follows_what_the_script_prints(script: Any, composer: Any) -> None:
    """On stdout; options behind the script are the script's own."""
    file = script(COMPILES + "import sys\nprint('done', *sys.argv[1:])\n")
    done = composer("run", file, "--json", "--help", "-m", "--", "x")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "done --json --help -m -- x"
    assert lines[1].startswith("composer: 1 graph in")
    assert "graph 1 [0/0]  __main__.f  (1 op, float32 on cpu)" in lines


PEER = """
import multiprocessing, pickle, sys
import beside

class Mine:
    pass

def square(x):
    return x * x

if __name__ == "__main__":
    print(sys.argv, sys.path[:2], __name__, __file__, __package__, __spec__ and __spec__.name)
    print(pickle.loads(pickle.dumps(Mine())).__class__ is Mine)
    print(sys.excepthook is sys.__excepthook__)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_script_finds_what_python_gives_it(script: Any, composer: Any, as_module: bool) -> None:
    """Arguments, path, names, pickles and child processes of objects in ``__main__``."""
    script("", "beside.py")
    file = script(PEER)
    how = (*(("-m", "script") if as_module else ("scripts/script.py",)), "a", "--b")
    folder = file.parent if as_module else file.parent.parent
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    plain, ours = python(*how, cwd=folder, env=env), composer("run", *how, cwd=folder, env=env)
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert "[9]" in plain.stdout
    assert ours.stdout == plain.stdout + "composer: nothing was compiled\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(3)",
        "sys.exit('no luck')",
        "1 / 0",
        "raise KeyboardInterrupt",
        "sys.excepthook = lambda *error: print('hook', error[0]); raise ValueError",
    ],
)
def test_script_ends_as_in_python(script: Any, composer: Any, ending: str) -> None:
    """Exit code and stderr, with the traceback from the script on; the report comes, too."""
    file = script(f"import sys\ndef last():\n    {ending}\nlast()\n")
    plain, ours = python(file), composer("run", file)
    assert ours.stderr == plain.stderr
    assert ours.returncode == (130 if "Keyboard" in ending else plain.returncode)
    assert ours.stdout == plain.stdout + "composer: nothing was compiled\n"


@pytest.mark.slow
@pytest.mark.parametrize("stdout", ["Tee()", "None", "open('log', 'w')", "broken()"])
def test_script_may_put_anything_into_stdout(script: Any, composer: Any, stdout: str) -> None:
    """The report goes to where it led before; Python flushes what is there when it ends."""
    text = """
import sys
class Tee:
    def __init__(self):
        self.behind = sys.stdout
    def write(self, text):
        self.behind.write(text)
class broken(Tee):
    def flush(self):
        raise OSError("gone")
"""
    file = script(f"{text}\nsys.stdout = {stdout}\n")
    done = composer("run", file, cwd=file.parent)
    assert "composer: nothing was compiled" in done.stdout
    assert done.returncode == python(file, cwd=file.parent).returncode


@pytest.mark.parametrize("closes", ["sys.stdout.close()", "os.close(1)"])
def test_script_that_closes_stdout_ends_as_it_does(script: Any, composer: Any, closes: str) -> None:
    """With its own exit code; where the report is left is said."""
    file = script(f"import os, sys\nprint('mine', flush=True)\n{closes}\nos.environ['X'] = '1'\n")
    done = composer("run", file)
    said = "composer: the script closed stdout, where the report was to come\n"
    assert (done.stdout, done.stderr, done.returncode) == ("mine\n", said, 0)


def test_syntax_error_is_shown_as_python_shows_it(script: Any, composer: Any) -> None:
    """Nothing of composer's stands around it."""
    file = script("x = = 1\n")
    assert composer("run", file).stderr == python(file).stderr


def test_error_in_the_script_does_not_lose_the_report(script: Any, composer: Any) -> None:
    """What was compiled until then."""
    done = composer("run", script(COMPILES + "raise ValueError('mine')\n"))
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: mine\n")
    assert "served by: honest 1" in done.stdout


def test_policy_and_telemetry_are_set_for_the_script_and_its_children(
    script: Any, composer: Any, tmp_path: Path
) -> None:
    """As absolute paths, since a script may change its folder; the report is the last line."""
    (tmp_path / "p.toml").write_text('[defaults]\nchain = ["aot_eager"]\n')
    file = script("""
        import os, torch
        os.chdir("/")
        print(os.environ["COMPOSER_TELEMETRY"])
        torch.compile(torch.sin, backend="composer")(torch.ones(2))
    """)
    asked = ("run", "--policy", "p.toml", "--telemetry", "t.jsonl", "--json", file)
    done = composer(*asked, cwd=tmp_path)
    first, last = done.stdout.splitlines()
    assert first == str(tmp_path / "t.jsonl")
    (graph,) = json.loads(last)["graphs"]
    assert (graph["chosen"], graph["policy"]) == ("aot_eager", ["defaults"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--policy", "wrong.toml", "script.py"], "'chain'"),
        (["--policy", "missing.toml", "script.py"], "missing.toml"),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
    ],
)
def test_mistakes_are_found_before_the_script_runs(
    script: Any, asked: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, as for any wrong use of the command."""
    folder = script("print('ran')").parent
    (folder / "wrong.toml").write_text("[defaults]\nchian = []\n")
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["run", *asked])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("composer: ")
    assert said in done.stderr


@pytest.mark.parametrize("command", ["run", "lock"])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["-m", "nosuchmodule"], "No module named nosuchmodule"),
        (["-m", "json.nosuch"], "No module named json.nosuch"),
        (["-m", "importlib"], "'importlib' is a package and cannot be directly executed"),
        (["."], "can't find '__main__' module in '.'"),
    ],
)
def test_script_that_is_not_there_is_not_run(
    composer: Any, tmp_path: Path, command: str, asked: list[str], said: str
) -> None:
    """Exit code 2, one line that says why, and no report."""
    done = composer(command, *asked, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "composer: there is nothing to run: " in done.stderr
    assert "Traceback" not in done.stderr


def test_module_that_cannot_import_another_was_run(script: Any, composer: Any) -> None:
    """It fails as it would in Python."""
    folder = script("import nosuchmodule\n", "mine.py").parent
    done = composer("run", "-m", "mine", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stdout == "composer: nothing was compiled\n"


@pytest.mark.slow
def test_other_backends_are_named_as_the_cause_of_an_empty_report(
    script: Any, composer: Any
) -> None:
    """Somebody who expects a report has most often not said backend="composer"."""
    file = script("import torch\ntorch.compile(torch.sin, backend='eager')(torch.ones(2))\n")
    done = composer("run", file)
    assert done.stdout == (
        'composer: nothing was compiled\ntorch.compile was used, and not with backend="composer"\n'
    )


def test_explain_shows_graphs_and_breaks_of_a_script(script: Any, composer: Any) -> None:
    """With file, line and source; as JSON, too."""
    code = COMPILES.replace("    return torch.sin(x)", "    print('hi')\n    return torch.sin(x)")
    file = script(code)
    done = composer("run", "--breaks", file)
    assert done.returncode == 0, done.stderr
    assert "served by: honest 1; 1 graph break" in done.stdout
    line = code.splitlines().index("    print('hi')") + 1
    assert f"graph break  {file}:{line}\n  print('hi')\n" in done.stdout
    read = json.loads(composer("run", "--breaks", "--json", file).stdout.splitlines()[-1])
    assert (len(read["graphs"]), read["graph_breaks"][0]["line"]) == (1, line)


SLOW = """
import sys, time, torch

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)

def slow(gm, example_inputs):
    print("unfinished", end="", flush=True)
    time.sleep(2.5)
    print(" line")
    return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

print(type(sys.stdout).__name__, sys.stdout is sys.__stdout__)
torch.compile(Net(), backend="composer", options={"chain": [slow]})(torch.ones(3))
print("end")
"""


def in_a_terminal(*args: Any) -> str:
    """What a command writes to a terminal, and all of it: stdout and stderr."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "composer", *map(str, args)]
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        while select.select([ours], [], [], 120)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
        assert process.wait(timeout=60) == 0, seen.decode()
    os.close(ours)
    return seen.decode().replace("\r\n", "\n")


LINE = re.compile("compiling graph 1 of Net \\(1 op\\): slow, ([0-9]+) s")


def test_terminal_shows_what_takes_long(script: Any) -> None:
    """From the second second on; the script's own output stays whole, and nothing is left over."""
    seen = in_a_terminal("run", script(SLOW))
    seconds = sorted(map(int, set(LINE.findall(seen))))
    assert seconds == list(range(1, max(2, len(seconds)) + 1))
    drawn = re.compile("\x1b\\[J\x1bD\x1bD\x1b\\[2A\x1b7\x1b\\[2B\r" + LINE.pattern + "\x1b8")
    printed = drawn.sub("", seen).replace("\x1b[J", "")
    assert printed.startswith("TextIOWrapper True\nunfinished line\nend\ncomposer: 1 graph in")
    assert "\x1b" not in printed


@pytest.mark.slow
def test_no_progress_where_stderr_is_no_terminal(script: Any, composer: Any) -> None:
    """Nothing at all is written to it."""
    done = composer("run", script(SLOW))
    assert done.stdout.startswith("TextIOWrapper True\nunfinished line\nend\n")
    assert done.stderr == ""


@pytest.mark.slow
def test_run_says_which_engines_the_default_chain_did_not_come_to(
    script: Any, composer: Any
) -> None:
    """And the command that compares them, once; not where the user wrote the chain."""
    file = script('import torch\ntorch.compile(torch.sin, backend="composer")(torch.ones(3))\n')
    done = composer("run", file)
    asked = f"COMPOSER_CHAIN=auto COMPOSER_SELECT=fastest composer run {file}"
    *_, said = done.stdout.splitlines()
    assert said.startswith("installed and not tried: ")
    assert said.endswith(f"onnxrt; {asked} compares them")
    assert done.stdout.count("not tried") == 1
    done = composer("run", "--breaks", file, env={**os.environ, "COMPOSER_CHAIN": "onnxrt"})
    assert "served by: onnxrt 1" in done.stdout
    assert "not tried" not in done.stdout


OTHERS = """
import torch

@torch.compile
def f(x):
    return torch.sin(x) + 1

torch.compile(torch.cos, backend="aot_eager")(f(torch.ones(3)))
"""


@pytest.mark.slow
def test_override_gives_composer_what_another_backend_was_asked_for(
    script: Any, composer: Any
) -> None:
    """The report says which backends those were."""
    done = composer(
        "run", "--override", script(OTHERS), env={**os.environ, "COMPOSER_CHAIN": "eager"}
    )
    assert done.stdout.startswith("composer: 2 graphs"), done.stderr
    assert done.stdout.endswith(
        "the program asked for inductor, aot_eager; --override gave its graphs to composer\n"
    )


@pytest.mark.slow
def test_override_reaches_child_processes(script: Any, composer: Any, tmp_path: Path) -> None:
    """They inherit torch's own variable."""
    script(OTHERS, "other.py")
    parent = script(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'other.py'], check=True)\n"
    )
    records = tmp_path / "records.jsonl"
    done = composer(
        *("run", "--override", "--telemetry", records, parent),
        cwd=parent.parent,
        env={**os.environ, "COMPOSER_CHAIN": "eager"},
    )
    assert done.returncode == 0, done.stderr
    assert "the program itself asked for no other backend" in done.stdout
    assert '"torch.cos"' in "".join(file.read_text() for file in tmp_path.glob("records*"))
