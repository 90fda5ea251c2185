"""The switches of the environment have the last word."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from common import ROOT, compiled, last
from policies import Encoder, free_function, run, write
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer.errors import FallbackWarning
from composer.telemetry.notices import VARIABLES


def test_switches_have_the_last_word(monkeypatch) -> None:
    """Chain, strictness, and composer as a whole."""
    monkeypatch.setenv("COMPOSER_STRICT", "on")
    with pytest.raises(BackendCompilerFailed, match="CandidateError"):
        run(chain=["tensorrt", "eager"])
    monkeypatch.setenv("COMPOSER_STRICT", "no")
    assert run(chain=["tensorrt", "aot_eager"]).chosen == "aot_eager"
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    torch.compiler.reset()
    assert (run(chain=["aot_eager"]).chosen, last().policy[-1]) == ("eager", "COMPOSER_DISABLE")
    assert "timing" not in run(select="fastest").attempts[0].engine


@pytest.mark.parametrize(
    ("options", "variables", "text"),
    [
        ({"chian": []}, {}, ""),
        ({"select": "speed"}, {}, ""),
        ({}, {"COMPOSER_STRICT": "maybe"}, ""),
        ({}, {"COMPOSER_CHAIN": "['a']"}, ""),
        ({}, {"COMPOSER_CONFIG": "not-here.toml"}, ""),
        ({}, {}, "[defaults\n"),
        ({}, {}, "[backends.onxrt]\nthreads = 1\n"),
        ({}, {}, "[defaults]\nlocked = true\nverify = 3\n"),
    ],
)
def test_disabling_works_whatever_is_malformed(monkeypatch, options, variables, text) -> None:
    """With one warning that says what, where that would have been read."""
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    write(text)
    x = torch.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in (Encoder(), free_function):
            assert torch.equal(compiled(module, **options)(x), module(x))
    assert (last().chosen, last().policy[-1]) == ("eager", "COMPOSER_DISABLE")
    told = [str(each.message) for each in caught if each.category is FallbackWarning]
    (said,) = told
    assert said.startswith("COMPOSER_DISABLE is on, and a mistake is disregarded: ")


@pytest.mark.parametrize(
    "variables",
    [
        {"COMPOSER_SINKS": "promethues"},
        {"COMPOSER_TELEMETRY": "x.jsonl", "COMPOSER_TELEMETRY_MAX_BYTES": "64MB"},
    ],
)
def test_disabling_works_whatever_is_malformed_of_the_telemetry(
    monkeypatch, tmp_path, variables
) -> None:
    """With a warning of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(composer.errors.TelemetryWarning, match="promethues|64MB"):
        assert run().chosen == "eager"


def test_disabling_leaves_nothing_to_the_background(monkeypatch) -> None:
    """Though the policy asks for it, no child process is started to find that eager serves."""
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    begun = Mock(side_effect=AssertionError)
    monkeypatch.setattr("composer.runtime.background.begin", begun)
    f = compiled(torch.sin, "aot_eager", select={"by": "fastest", "background": True})
    for _ in range(3):
        f(torch.ones(2))
    assert not begun.called
    (attempt,) = last().attempts
    assert (attempt.backend, attempt.status) == ("eager", "succeeded")


def test_disabling_disregards_the_slip_in_the_name_of_an_engines_table(monkeypatch) -> None:
    """The warning names it with its file."""
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    path = write("[backends.onxrt]\nthreads = 1\n")
    with pytest.warns(FallbackWarning, match=re.escape(f"disregarded: {path}: table 'backends'")):
        assert run().chosen == "eager"


def test_disabling_looks_up_no_engine_and_no_pass(monkeypatch) -> None:
    """None of them is to run."""
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    assert run(chain=["onxrt"], passes=["no_such:Pass"]).chosen == "eager"


@pytest.mark.parametrize("source", [3, "not-here.toml", {"defaults": {"chian": []}}])
def test_disabling_disregards_mistakes_in_the_program(monkeypatch, source) -> None:
    """Of ``configure``, ``using`` and ``mode``: one warning has them all, at the first compile."""
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    composer.configure(source)
    x = torch.ones(2)
    sine, cosine = (
        torch.compile(function, backend="composer", mode="max-autotun")
        for function in (torch.sin, torch.cos)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with composer.using(source), composer.using(strikt=1):
            assert torch.equal(sine(x), x.sin())
            assert torch.equal(cosine(x), x.cos())
    (said,) = (str(each.message) for each in caught if each.category is FallbackWarning)
    assert said.startswith("COMPOSER_DISABLE is on, and a mistake is disregarded: ")
    assert "unknown mode 'max-autotun'" in said
    assert "unknown option 'strikt'" in said
    assert last().chosen == "eager"


def test_a_switch_that_is_neither_on_nor_off_is_an_error(monkeypatch) -> None:
    """With the words it takes."""
    monkeypatch.setenv("COMPOSER_STRICT", "maybe")
    with pytest.raises(BackendCompilerFailed, match="COMPOSER_STRICT is 'maybe'"):
        run(chain=["eager"])


def test_a_misspelt_switch_is_warned_of(monkeypatch) -> None:
    """Once; and not another program's, whose prefix is the same."""
    monkeypatch.setenv("COMPOSER_DISABEL", "1")
    monkeypatch.setenv("COMPOSER_DISABLE_NETWORK", "1")
    with pytest.warns(FallbackWarning) as caught:
        assert run(chain=["aot_eager"]).chosen == "aot_eager"
    (said,) = caught
    assert "COMPOSER_DISABEL is set" in str(said.message)
    assert "mean COMPOSER_DISABLE?" in str(said.message)
    torch.compiler.reset()
    run(chain=["aot_eager"])


def test_all_variables_that_are_read_are_known() -> None:
    """So that none of them is taken for a slip, or left out of the page on them."""
    sources = Path(composer.__file__).parent.rglob("*.py")
    read_ = {name for each in sources for name in re.findall(r"COMPOSER_[A-Z_]+", each.read_text())}
    assert read_ - {"COMPOSER_"} == set(VARIABLES)
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    table = page.partition("## Environment variables")[2].partition("\n## ")[0]
    assert set(re.findall(r"COMPOSER_[A-Z_]+", table)) == set(VARIABLES)
