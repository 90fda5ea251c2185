"""The documentation: its code runs, its tables are complete, its links lead somewhere."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from common import ROOT
from pages import FENCE, not_named, python_blocks, sections

import composer.backends.base
from composer import Attempt, Candidate, CompileReport, Policy, Reason
from composer.cli import COMMANDS, app, command
from composer.policy import Cache, Distributed, OnRuntimeError, Precision, Select, Verify
from composer.records import Counters, GraphInput, PassRecord

pytestmark = pytest.mark.docs

PAGES = sorted(page for page in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md") if page.is_file())
RECORDS = (CompileReport, Attempt, PassRecord, GraphInput, Counters)
NOT_GIVEN = "No part of this release gives this reason yet."

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An empty ``__main__``, as a reader's own script has it; what a page sets is set back."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    logger = logging.getLogger("composer")
    level = logger.level
    at_end = signal.getsignal(signal.SIGTERM)
    yield main
    signal.signal(signal.SIGTERM, at_end)
    logger.setLevel(level)
    torch.compiler.set_stance("default")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@torch._dynamo.config.patch(enable_aot_compile=True)  # off in torch 2.11
def test_code_in_the_docs_runs(page: Path, script: types.ModuleType) -> None:
    """The blocks of a page, run one after the other, raise nothing and hold what they assert."""
    if page.name == "quantise.md":
        pytest.importorskip("torchao")
    for code in python_blocks(page.read_text()):
        exec(compile(code, str(page), "exec"), script.__dict__)


def test_blocks_keep_their_line_and_the_marked_ones_are_left_out() -> None:
    """An error in a block is reported at the page's own line."""
    page = "# Title\n\n```python\nx = 1\n```\n\n<!-- not run: no GPU -->\n```python\ny\n```\n"
    assert list(python_blocks(page)) == ["\n\n\nx = 1\n"]


def test_reasons_page_has_one_section_for_each_reason() -> None:
    """Every code, and nothing else."""
    assert set(sections("reference/reasons.md")) == {f"`{reason}`" for reason in Reason}


def test_reasons_page_says_which_reasons_nothing_gives() -> None:
    """Exactly those that stand nowhere in composer's code."""
    code = "".join(
        path.read_text()
        for path in (ROOT / "composer").rglob("*.py")
        if path != ROOT / "composer" / "records.py"
    )
    given = {f"`{reason}`" for reason in Reason if re.search(rf"Reason\.{reason.name}\b", code)}
    page = sections("reference/reasons.md")
    said = {heading for heading, text in page.items() if NOT_GIVEN not in text}
    assert said == given


def test_policy_page_names_every_field() -> None:
    """Of the policy, its tables and those of the process, and of a candidate."""
    models = (Policy, Candidate, Select, Verify, Precision, OnRuntimeError, Cache, Distributed)
    names = [name for each in models for name in each.model_fields]
    assert not_named("reference/policy.md", *names) == []


def test_report_page_names_every_field() -> None:
    """Of a graph's record and its parts."""
    records = [field.name for kind in RECORDS for field in dataclasses.fields(kind)]
    assert not_named("reference/report.md", *records) == []


def test_api_page_has_every_public_name_once() -> None:
    """Of each module that it documents."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    documented = re.findall(r"^\.\. auto(?:class|function|exception):: ([\w.]+)", page, re.M)
    modules = (composer, composer.passes, composer.testing, composer.backends.base)
    public = {(n, getattr(each, n)) for each in modules for n in each.__all__}
    public |= set(inspect.getmembers(composer.errors, inspect.isclass))
    names = {n for n, v in public if "composer" in getattr(v, "__module__", "")}
    assert names - set(documented) == set()
    assert len(documented) == len(set(documented))


def options_of(command: Any) -> Iterator[str]:
    """The options of a command and of those below it."""
    yield from (each for p in command.params for each in (*p.opts, *p.secondary_opts))
    for below in getattr(command, "commands", {}).values():
        yield from options_of(below)


def test_pages_name_every_option_of_the_command() -> None:
    """On the page that has the subcommand."""
    text = "\n".join(page.read_text() for page in PAGES)
    commands = [typer.main.get_command(app), *map(command, COMMANDS)]
    options = (option for each in commands for option in options_of(each))
    found = {each for each in options if each.startswith("--")}
    assert "--dynamic" in found
    assert [each for each in sorted(found) if not re.search(rf"{each}\b", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    """Web addresses are not looked at."""
    links = LINK.findall(FENCE.sub("", page.read_text()))
    files = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    assert [file for file in files if not (page.parent / file).exists()] == []


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: no punctuation, hyphens for spaces."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_of_links_lead_to_headings(page: Path) -> None:
    """Of this page, or of another one in Markdown."""
    links = LINK.findall(FENCE.sub("", page.read_text()))
    parts = [link.partition("#") for link in links if not re.match(r"[a-z]+:", link)]
    named = [(file, anchor) for file, _, anchor in parts if anchor]
    assert [each for each in named if each[1] not in anchors(page.parent / (each[0] or page))] == []
