"""Where policies come from: files, ``composer.configure`` and ``composer.using``."""

from __future__ import annotations

import re

import pytest
import torch
from common import last
from policies import EAGER, GRAPH, run, write
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer.chain.candidates import ONLY_TABLES
from composer.errors import OptionError, UnknownNameError
from composer.policy.resolution import resolve
from composer.policy.sources import read
from composer.session import current


def test_a_file_in_the_working_directory_holds() -> None:
    """``composer.toml`` before ``pyproject.toml``."""
    write('[tool.composer.defaults]\nchain = ["aot_eager"]\n', "pyproject.toml")
    assert (run().chosen, last().policy) == ("aot_eager", ("defaults",))
    write(EAGER)
    torch.compiler.reset()
    assert run().chosen == "eager"


def test_a_pyproject_of_somebody_elses_is_no_policy() -> None:
    """Without a table of ours it says nothing."""
    write('[project]\nname = "else"\n', "pyproject.toml")
    assert run(chain=["eager"]).policy == ("options",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[tool]\ncomposer = "on"\n', "is one table, not 'on'"),
        ("[tool]\ncomposer = true\n", "is one table, not True"),
        ("[[tool.composer]]\na = 1\nb = 2\n", "is one table, not "),
        ("tool = 3\n", r"has no table \[tool.composer\]"),
        ('[project]\nname = "else"\n', r"has no table \[tool.composer\]"),
    ],
)
def test_a_pyproject_without_a_table_of_ours_is_no_policy_file(text: str, said: str) -> None:
    """Whoever names it is told."""
    file = write(text, "pyproject.toml")
    with pytest.raises(OptionError, match=rf"pyproject.toml.* {said}"):
        read(file)


def test_a_configured_source_goes_before_files_found_here(monkeypatch) -> None:
    """And the file named by the environment before that."""
    write(EAGER)
    composer.configure({"defaults": {"chain": ["aot_eager"]}})
    assert run().chosen == "aot_eager"
    named = write('[defaults]\nchain = ["eager"]\nmodel = "named"\n', "other.toml")
    monkeypatch.setenv("COMPOSER_CONFIG", str(named))
    torch.compiler.reset()
    assert (run().chosen, last().model) == ("eager", "named")


@pytest.mark.parametrize("kind", ["path", "mapping", "book", "policy"])
def test_configure_takes_four_kinds_of_source(kind: str) -> None:
    """A file's path, a mapping shaped like it, a book, a policy for all."""
    table = {"defaults": {"chain": ["aot_eager"]}}
    composer.configure(
        {
            "path": write('[defaults]\nchain = ["aot_eager"]\n', "mine.toml"),
            "mapping": table,
            "book": composer.PolicyBook(**table),
            "policy": composer.Policy(chain=["aot_eager"]),
        }[kind]
    )
    assert (run().chosen, last().policy) == ("aot_eager", ("defaults",))


@pytest.mark.parametrize("kind", ["mapping", "book", "policy"])
def test_what_was_configured_is_not_changed_with_the_object_that_was_given(kind: str) -> None:
    """Whatever the object is, and however deep in it the change is."""
    options = {"session_config": {"a": "1"}}
    table = {"defaults": {"chain": [{"backend": "onnxrt", "options": options}]}}
    source = {
        "mapping": table,
        "book": composer.PolicyBook(**table),
        "policy": composer.Policy(**table["defaults"]),
    }[kind]
    composer.configure(source)
    options["session_config"]["a"] = "2"
    table["defaults"]["chain"].append("eager")
    if kind != "mapping":
        policy = source if kind == "policy" else source.defaults
        policy.chain[0].options["more"] = 3
    (candidate,) = resolve(GRAPH, ONLY_TABLES, configured=current().configured).policy.chain
    assert candidate.options == {"session_config": {"a": "1"}}


def test_policy_in_force_is_not_changed_with_the_object_that_was_given() -> None:
    """A graph keeps its policy for the candidates that it may need later."""
    options = {"session": {"threads": 1}}
    chain = [{"backend": "onnxrt", "options": options}]
    by_options = resolve(GRAPH, ONLY_TABLES, options={"chain": chain})
    with composer.using({"defaults": {"chain": chain}}):
        options["session"]["threads"] = 2
        by_context = resolve(GRAPH, ONLY_TABLES)
    for rules in (by_options, by_context):
        assert rules.policy.chain[0].options == {"session": {"threads": 1}}


def test_a_changed_file_is_read_again() -> None:
    """By the next compile."""
    path = write(EAGER)
    composer.configure(path)
    assert run().chosen == "eager"
    path.write_text('[defaults]\nchain = ["aot_eager"]\n')
    torch.compiler.reset()
    assert run().chosen == "aot_eager"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version = 2\n", "version"),
        ("version = true\n", "'version' is True: the version of the format is the whole number 1"),
        ("version = 1.0\n", "'version' is 1.0: the version of the format is the whole number 1"),
        ("[defaults\n", "cannot be read"),
        ('[defaults]\nchian = ["eager"]\n', "'defaults.chian'; did you mean 'chain'?"),
        (
            '[[models]]\nmatch = { modle = "x" }\n',
            r"models\[0\].match.modle'; did you mean 'model'?",
        ),
        ("[modles]\n", "'modles'; did you mean 'models'?"),
        ('chain = ["eager"]\n', "'chain' is an option of the table 'defaults'"),
        ("[defaults]\nstrict = 'perhaps'\nmin_coverage = 3\n", "strict.*min_coverage"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(text: str, said: str) -> None:
    """File, table, key, what is nearest: at once, or at the first compile where it is found."""
    with pytest.raises(OptionError, match=said.replace("?", r"\?")) as told:
        composer.configure(write(text, "mine.toml"))
    assert "mine.toml" in str(told.value)
    write(text)
    with pytest.raises(BackendCompilerFailed, match=said.replace("?", r"\?")) as caught:
        run()
    assert isinstance(caught.value.inner_exception, OptionError)
    assert "composer.toml" in str(caught.value.inner_exception)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"defaults": {"chian": []}}, "unknown option 'defaults.chian'; did you mean 'chain'?"),
        ({"defaults": {"chain": ["onxrt"]}}, "defaults: unknown backend 'onxrt'; did you mean"),
        (
            {"models": [{"passes": ["fold_batchnorm"]}]},
            "models[0]: unknown pass 'fold_batchnorm'; did you mean 'fold_batch_norm'?",
        ),
        (
            {"backends": {"onnxrt": {"thread": 1}}},
            "backends.onnxrt: backend 'onnxrt': unknown option 'thread'; did you mean 'threads'?",
        ),
        ("not-here.toml", "not-here.toml' cannot be read: No such"),
        (composer.Policy(chain=["onxrt"]), "defaults: unknown backend 'onxrt'"),
    ],
)
def test_configure_raises_at_once_and_changes_nothing(source, said: str) -> None:
    """Keys, names of engines and passes, options of engines, a file that is missing."""
    composer.configure({"defaults": {"chain": ["aot_eager"]}})
    with pytest.raises((OptionError, UnknownNameError), match=re.escape(said)):
        composer.configure(source)
    assert run().chosen == "aot_eager"


def test_configure_imports_no_code() -> None:
    """What it names may be defined after the call, as in the module that makes it."""
    composer.configure({"defaults": {"chain": ["not_yet:engine"], "passes": ["not_yet:Pass"]}})
    with pytest.raises(BackendCompilerFailed, match="'not_yet:engine' cannot be imported"):
        run()


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    """As editors on Windows write it."""
    path = write("\ufeff[defaults]\nchain = ['eager']\n")
    assert resolve(GRAPH, ONLY_TABLES, configured=path).policy.chain[0].name == "eager"


def test_a_missing_file_is_an_error_that_names_it(monkeypatch) -> None:
    """Whoever pointed at it meant it."""
    monkeypatch.setenv("COMPOSER_CONFIG", "not-here.toml")
    with pytest.raises(BackendCompilerFailed, match=r"not-here.toml' cannot be read: No such"):
        run()


def test_reset_keeps_the_configuration() -> None:
    """It forgets what happened, not what was asked for."""
    composer.configure({"defaults": {"chain": ["aot_eager"]}})
    composer.reset()
    assert run().chosen == "aot_eager"


def test_a_book_of_nothing_is_empty() -> None:
    """So are its layers."""
    assert read(None) == composer.PolicyBook()


@pytest.mark.parametrize("source", [3, ["eager"], b"composer.toml"])
def test_what_is_no_source_is_named(source) -> None:
    """At once."""
    with pytest.raises(OptionError, match="a policy is a PolicyBook"):
        composer.configure(source)
    with pytest.raises(OptionError, match="not "), composer.using(source):
        pass
