"""The command line, as a user types it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli_w
import torch
from common import compiled
from rewrites import CosineToSine, Scale
from typer.testing import CliRunner

import composer
from composer.cli import COMMANDS, app, command
from composer.passes.resolve import PASSES
from composer.policy.model import PolicyBook

runner = CliRunner()


def test_the_list_of_commands_is_there_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_python
) -> None:
    """So are the reason codes, and the records that processes wrote."""
    file = tmp_path / "records.jsonl"
    monkeypatch.setenv("COMPOSER_TELEMETRY", str(file))
    compiled(torch.sin, "eager")(torch.ones(2))
    page = f"report {file} --html {tmp_path / 'page.html'}"
    for given in ("--help", "--version", "reasons timeout", f"report {file}", page, "repot"):
        code = f"""import atexit, sys
atexit.register(lambda: print("torch" in sys.modules))
from composer.cli import app
app({given.split()})"""
        assert fresh_python(code).stdout.splitlines()[-1] == "False"
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_a_command_what_it_says_itself(name: str) -> None:
    """Its line stands where the list is made, since its module is not imported for that."""
    said = command(name).help
    assert said is not None
    assert said.splitlines()[0] == COMMANDS[name][1]
    assert runner.invoke(app, [name, "--help"]).exit_code == 0


def test_version() -> None:
    """The distribution's own."""
    assert version("torch-compile-composer") in runner.invoke(app, ["--version"]).output


@pytest.fixture
def passes() -> None:
    composer.passes.register(CosineToSine)
    composer.passes.register(Scale)


@pytest.mark.usefixtures("passes")
def test_passes_list_names_every_pass() -> None:
    """Name, stage, what it does in a sentence, the package it comes from."""
    rows = json.loads(runner.invoke(app, ["passes", "list", "--json"]).output)
    assert {each["name"]: each for each in rows}["scale"] == {
        "name": "scale",
        "stage": "post_grad",
        "doc": "Multiply every cosine by a number.",
        "package": "rewrites",
    }
    table = runner.invoke(app, ["passes", "list"])
    assert table.exit_code == 0
    for expected in ("cosine_to_sine", "aten", "scale", "post_grad"):
        assert expected in table.output


def test_passes_list_cuts_no_name_short() -> None:
    """A name is there to be copied into a policy, also from a terminal of the usual width."""
    output = runner.invoke(app, ["passes", "list"], env={"COLUMNS": "80"}).output
    assert "eliminate_common_subexpressions" in output


def test_a_pass_that_says_nothing_of_itself_is_not_described_as_its_base(monkeypatch) -> None:
    """Nobody takes the contract of all passes for what this one does."""
    monkeypatch.setattr(PASSES.get("remove_no_ops"), "__doc__", None)
    (row,) = (
        each
        for each in json.loads(runner.invoke(app, ["passes", "list", "--json"]).output)
        if each["name"] == "remove_no_ops"
    )
    assert row["doc"] == ""


def test_passes_list_shows_brackets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass says of itself is no markup."""
    monkeypatch.setattr(PASSES.get("remove_no_ops"), "__doc__", "Drops [red]everything[/red].")
    assert "[red]" in runner.invoke(app, ["passes", "list"]).output


@pytest.mark.usefixtures("passes")
def test_passes_list_shows_what_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's broken module has a row that says so."""
    monkeypatch.setitem(PASSES._discovered[0], "broken", "nowhere_at_all:Fuse")
    rows = json.loads(runner.invoke(app, ["passes", "list", "--json"]).output)
    (row,) = (each for each in rows if each["name"] == "broken")
    assert row["doc"].startswith("cannot be imported: ModuleNotFoundError")


@pytest.mark.usefixtures("passes")
def test_passes_show_says_all_about_one() -> None:
    """For a person, and for a program; by name, and as module:Class."""
    text = runner.invoke(app, ["passes", "show", "scale"]).output
    assert "Multiply every cosine by a number." in text
    assert "stage:    post_grad" in text
    assert "field:    factor: float = 2.0" in text
    facts = json.loads(runner.invoke(app, ["passes", "show", "rewrites:Scale", "--json"]).output)
    assert facts["uuid"] == Scale().uuid()
    assert facts["source"].endswith("rewrites.py")
    assert facts["fields"] == [{"name": "factor", "type": "float", "default": "2.0"}]


@pytest.mark.usefixtures("passes")
def test_passes_show_names_the_nearest() -> None:
    """A slip is an error, and the exit code says so."""
    result = runner.invoke(app, ["passes", "show", "scal"])
    assert result.exit_code == 1
    assert "unknown pass 'scal'; did you mean 'scale'?" in result.output


def test_passes_show_refuses_what_is_no_pass() -> None:
    """As ``policy check`` does."""
    result = runner.invoke(app, ["passes", "show", "torch.nn:Linear"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "which is no class of passes" in result.stderr


POLICY = """
[defaults]
chain = ["onnxrt", { backend = "inductor", options = { freezing = true } }]
[[models]]
match = { model = "*.Bert*", training = false }
strict = true
passes = ["scale"]
[backends.onnxrt]
threads = 2
"""


def test_policy_check_passes_what_is_right(passes, tmp_path) -> None:
    """And says how many rules there are."""
    file = tmp_path / "composer.toml"
    file.write_text(POLICY)
    result = runner.invoke(app, ["policy", "check", str(file)])
    assert (result.exit_code, "1 rule, nothing wrong" in result.output) == (0, True)


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch) -> None:
    """As ``python -m composer`` finds them, and what names one has to be pointed at."""
    module = tmp_path / "own_things.py"
    module.write_text(
        "from composer.passes.base import GraphPass\n\n\ndef compile(gm, inputs):\n"
        '    return gm\n\n\nclass Nothing(GraphPass):\n    """Does nothing."""\n'
    )
    file = tmp_path / "composer.toml"
    file.write_text('[defaults]\nchain = ["own_things:compile"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    result = runner.invoke(app, ["policy", "check", str(file)])
    assert (result.exit_code, "nothing wrong" in result.output) == (0, True), result.output
    assert "COMPOSER_CONFIG" in result.output
    assert "import code: own_things:compile" in result.output
    monkeypatch.delitem(sys.modules, "own_things")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
    result = runner.invoke(app, ["passes", "show", "own_things:Nothing"])
    assert (result.exit_code, "Does nothing." in result.output) == (0, True), result.output
    monkeypatch.delitem(sys.modules, "own_things")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[defaults]\nchain = ["onxrt"]\npasses = ["scael"]\n', ["'onnxrt'", "'scale'"]),
        ("[defaults]\nstrikt = 1\n[[models]]\nmach = 1\n", ["'strict'", "'match'"]),
        ("[backends.onnxrt]\nthread = 2\n", ["did you mean 'threads'?"]),
    ],
)
def test_policy_check_names_every_mistake(passes, tmp_path, text: str, said: list[str]) -> None:
    """Keys, names of engines and passes, options of engines; the exit status is 1."""
    file = tmp_path / "composer.toml"
    file.write_text(text)
    result = runner.invoke(app, ["policy", "check", str(file)])
    assert result.exit_code == 1
    assert all(each in result.output for each in said)


def test_policy_check_prints_every_mistake_with_its_line(passes, tmp_path) -> None:
    """All kinds of them at once: keys, values, engines, their options, passes."""
    file = tmp_path / "composer.toml"
    file.write_text(
        "version = 1\n"
        "[defaults]\n"
        "chain = [\n"
        '  "onxrt",\n'
        '  { backend = "onnxrt", options = { thread = 2 } },\n'
        "]\n"
        "freezing = true\n"
        'passes = ["scael"]\n'
        "[[models]]\n"
        'match = { modle = "x" }\n'
        "[[models]]\n"
        "timeout = -1\n"
        "select_seconds = 2\n"
        "[models.match]\n"
        "trainin = true\n"
        "[backends.inductor]\n"
        "freezin = true\n"
    )
    result = runner.invoke(app, ["policy", "check", str(file)])
    said = {
        4: "unknown backend 'onxrt'; did you mean 'onnxrt'?",
        5: "backend 'onnxrt': unknown option 'thread'; did you mean 'threads'?",
        7: "unknown option 'defaults.freezing'; it is an option of Inductor, which stands in the",
        8: "unknown pass 'scael'; did you mean 'scale'?",
        10: "unknown option 'models[0].match.modle'; did you mean 'model'?",
        12: "option 'models[1].timeout' is -1: Input should be greater than 0",
        13: "unknown option 'models[1].select_seconds'",
        15: "unknown option 'models[1].match.trainin'; did you mean 'training'?",
        17: "backend 'inductor': unknown option 'freezin'; did you mean 'freezing'?",
    }
    assert result.exit_code == 1
    for line, (number, start) in zip(result.stdout.splitlines(), said.items(), strict=True):
        assert line.startswith(f"{file}:{number}: {start}")


def test_policy_check_says_where_a_file_is_no_toml(passes, tmp_path) -> None:
    """And in a ``pyproject.toml`` on which line of it a mistake is."""
    file = tmp_path / "composer.toml"
    file.write_text("version = 1\n[defaults\n")
    result = runner.invoke(app, ["policy", "check", str(file)])
    assert result.stdout.startswith(f"{file}:2: this is not TOML: ")
    file = tmp_path / "pyproject.toml"
    file.write_text("[project]\nname = 'x'\n[tool.composer.defaults]\nstrikt = true\n")
    result = runner.invoke(app, ["policy", "check", str(file)])
    assert result.stdout.startswith(f"{file}:4: unknown option 'defaults.strikt'")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[models]]\nmatch = { device = 'gpu' }\n", "models[0].match: no device"),
        ("[[models]]\nmatch = { device = 'gpu:0' }\n", "no device is called 'gpu'; cuda?"),
        ("[[models]]\nmatch = { dtype = 'fp32' }\n", "no dtype is called 'fp32'; float32?"),
        ("[[models]]\nmatch = { dtype = 'flaot32' }\n", "did you mean 'float32'?"),
        ("[defaults]\nchain = ['fluffy']\n", "defaults.chain: no engine is called 'fluffy' here"),
        (
            "[defaults]\nchain = [{ backend = 'eager', when = { device = 'gpu' } }]\n",
            "defaults.chain: when: no device is called 'gpu'",
        ),
        ("[backends.fluffy]\na = 1\n", "backends.fluffy: no engine is called 'fluffy' here"),
        (
            "[defaults]\nselect = { by = 'fastest', objective = 'latency', calls = 3 }\n",
            "defaults.select: calls says nothing without objective = 'amortised'",
        ),
        (
            "[defaults]\nselect = { seconds = 3 }\n",
            "defaults.select: seconds says nothing without by = 'fastest'",
        ),
        (
            "[defaults]\nverify = { when = 'compile', every = 9 }\n",
            "defaults.verify: every says nothing without when = 'sample'",
        ),
        (
            "[[models]]\nprecision = { max_error = 0.1 }\n",
            "models[0].precision: max_error says nothing without mode = 'auto' or mode = 'bf16' "
            "or mode = 'int8'",
        ),
        (
            "[[models]]\nprecision = { mode = 'int8', allow = ['int8'] }\n",
            "models[0].precision: allow says nothing without mode = 'auto'",
        ),
        (
            "[[models]]\nverify = { rtol = 1e-3 }\n",
            "models[0].verify: rtol says nothing without when = 'compile' or when = 'sample'",
        ),
        (
            "[defaults]\nchain = ['inductor', 'eager']\n[[models]]\nmemory_limit = 4096\n",
            "models[0]: memory_limit says nothing of inductor without isolate = true",
        ),
        (
            "[defaults]\nchain = [{ backend = 'inductor', memory_limit = 4096 }]\n",
            "defaults: memory_limit says nothing of inductor without isolate = true",
        ),
        (
            "[cache]\nstore = 'bogus://x/y'\n",
            "the verdict store 'bogus://x/y' cannot be used: ValueError: Protocol not known",
        ),
    ],
)
def test_policy_check_notes_what_does_nothing(passes, tmp_path, text: str, said: str) -> None:
    """It may hold on another machine, so the exit status is 0."""
    file = tmp_path / "composer.toml"
    file.write_text(text)
    result = runner.invoke(app, ["policy", "check", str(file)])
    assert (result.exit_code, said in result.stdout) == (0, True), result.output


def test_policy_check_notes_nothing_of_what_holds(passes, tmp_path) -> None:
    """Globs, devices, dtypes that torch knows; fields whose switch some table of the file sets."""
    file = tmp_path / "composer.toml"
    file.write_text(
        "[[models]]\nmatch = { device = 'cuda:*', dtype = 'bfloat16' }\nchain = ['eager']\n"
        "select = { by = 'fastest', objective = 'amortised', calls = 3 }\n"
        "[[models]]\nmatch = { device = '*', dtype = 'fl*' }\nselect = { objective = 'latency' }\n"
        "[[models]]\nverify = 'sample'\nprecision = 'auto'\nisolate = true\n"
        "[[models]]\nverify = { every = 9, rtol = 1e-3 }\nprecision = { max_error = 0.1 }\n"
        "memory_limit = 4096\n"
        "[[models]]\nchain = [{ backend = 'inductor', isolate = true, memory_limit = 4096 }]\n"
    )
    result = runner.invoke(app, ["policy", "check", str(file)])
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1), result.output


@pytest.mark.parametrize(
    "defaults",
    [
        "chain = 'auto'\nverify = { rtol = 1e-2 }",
        "select = 'fastest'\nverify = { atol = 1e-5 }",
        "select = { background = true }",
    ],
)
def test_policy_check_knows_what_holds_by_default(passes, tmp_path, defaults: str) -> None:
    """Where composer chooses, it compares; the background may take the first engine."""
    file = tmp_path / "composer.toml"
    file.write_text(f"[defaults]\n{defaults}\n")
    result = runner.invoke(app, ["policy", "check", str(file)])
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1), result.output


def test_policy_show_names_the_file_in_force(passes, tmp_path, monkeypatch) -> None:
    """The one asked for rather than any other; or that there is none."""
    file = tmp_path / "own.toml"
    file.write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPOSER_CONFIG", "")
    assert runner.invoke(app, ["policy", "show"]).output.startswith("no policy file: ")
    monkeypatch.setenv("COMPOSER_CONFIG", "nowhere.toml")
    result = runner.invoke(app, ["policy", "show", "--file", "own.toml"])
    assert (result.exit_code, result.output.startswith(f"policy file: {file}\n")) == (0, True)


def test_policy_show_says_where_each_field_comes_from(passes, tmp_path, monkeypatch) -> None:
    """For a model, a device and a kind of graph."""
    file = tmp_path / "composer.toml"
    file.write_text(POLICY)
    monkeypatch.setenv("COMPOSER_CONFIG", "")
    asked = ["policy", "show", "--file", str(file), "--model", "a.BertModel", "--json"]
    rows = {row["field"]: row for row in json.loads(runner.invoke(app, asked).output)}
    assert (rows["strict"]["value"], rows["strict"]["from"]) == (True, "models[0]")
    assert rows["chain"]["value"][0] == {"backend": "onnxrt", "options": {"threads": 2}}
    assert rows["min_coverage"]["from"] == "composer"
    rows = json.loads(runner.invoke(app, [*asked, "--training"]).output)
    assert [row["field"] for row in rows if row["from"] == "models[0]"] == []


def test_policy_show_has_all_that_a_candidate_is_given(passes, tmp_path, monkeypatch) -> None:
    """Its limits and its share as well as its options; a name alone where there is nothing else."""
    monkeypatch.setenv("COMPOSER_CONFIG", "")
    given = {"backend": "aot_eager", "isolate": False, "timeout": 5.0, "min_coverage": 0.0}
    file = tmp_path / "own.toml"
    file.write_text(f"[defaults]\n{tomli_w.dumps({'chain': [given, 'eager']})}")
    result = runner.invoke(app, ["policy", "show", "--file", str(file), "--json"])
    rows = {row["field"]: row["value"] for row in json.loads(result.output)}
    assert rows["chain"] == [given, "eager"]


def test_policy_schema_takes_what_a_file_may_hold() -> None:
    """Names as well as tables in a chain; no callables."""
    schema = json.loads(runner.invoke(app, ["policy", "schema"]).output)
    assert set(schema["properties"]) == {
        *("version", "defaults", "models", "backends", "cache", "distributed")
    }
    chain, auto = schema["$defs"]["Policy"]["properties"]["chain"]["anyOf"]
    items = chain["items"]
    assert auto == {"const": "auto"}
    assert items["anyOf"][0] == {"type": "string"}
    assert schema["$defs"]["Candidate"]["properties"]["backend"]["type"] == "string"


@pytest.mark.parametrize("select", ["fastest", {"by": "fastest", "seconds": 3}])
def test_policy_schema_takes_a_word_or_a_table(select: Any) -> None:
    """As the policy itself does, and nothing else."""
    schema = json.loads(runner.invoke(app, ["policy", "schema"]).output)
    book = {"defaults": {"select": select, "chain": "auto"}, "cache": {"failures": 2}}
    jsonschema.validate(book, schema)
    assert PolicyBook.model_validate(book).defaults.select.by == "fastest"
    for wrong in ("speed", {"by": "speed"}, {"secnds": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"defaults": {"select": wrong}}, schema)


def test_policy_schema_says_what_it_is_and_describes_every_field() -> None:
    """So that an editor can show it beside what it completes."""
    schema = json.loads(runner.invoke(app, ["policy", "schema"]).output)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"].endswith("policy-1.json")
    silent = [path for path, field in fields_of(schema) if not field.get("description")]
    assert silent == []


def fields_of(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every property anywhere in a schema."""
    if isinstance(schema, dict):
        for name, field in schema.get("properties", {}).items():
            yield f"{path}.{name}", field
        for key, each in schema.items():
            yield from fields_of(each, f"{path}.{key}")
    if isinstance(schema, list):
        for each in schema:
            yield from fields_of(each, path)
