"""Sinks: who is on, what each is given, and that none is ever the user's problem."""

from __future__ import annotations

import logging
import textwrap
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
from common import compiled, in_child, last
from engines import honest
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer import session
from composer.errors import OptionError, TelemetryWarning
from composer.telemetry.base import Sink
from composer.telemetry.progress import Progress
from composer.telemetry.sinks import OWN, SINKS, Sinks
from composer.testing import FakeBackend


class Remembers:
    """All that a sink of another package needs."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def emit(self, record: dict[str, Any]) -> None:
        self.records.append(record)


class Raises:
    def emit(self, record: dict[str, Any]) -> None:
        raise OSError("disk full")


@pytest.fixture
def remembers() -> Any:
    sink = Remembers()
    session.add_sink(sink)
    yield sink
    session.remove_sink(sink)


def test_added_sink_gets_the_record_of_every_graph(remembers: Remembers) -> None:
    """As plain data, its own copy, until it is removed."""
    session.add_sink(remembers)  # a second time changes nothing
    compiled(torch.sin, engines.raises, honest)(torch.ones(2))
    (record,) = remembers.records
    assert record["attempts"] == last().to_dict()["attempts"]
    record.clear()
    assert last().to_dict()["chosen"] == "honest"
    session.remove_sink(remembers)
    compiled(torch.cos, honest)(torch.ones(2))
    assert len(remembers.records) == 1


def test_sink_gets_the_record_of_a_compile_that_ends_in_an_error(remembers: Remembers) -> None:
    """Under ``on_exhausted="raise"`` nobody is chosen."""
    with pytest.raises(BackendCompilerFailed):
        compiled(torch.sin, engines.raises, on_exhausted="raise")(torch.ones(2))
    assert [record["chosen"] for record in remembers.records] == [""]


def test_added_sinks_outlive_a_reset(remembers: Remembers) -> None:
    """``composer.reset`` forgets reports, not what was set up."""
    composer.reset()
    compiled(torch.sin, honest)(torch.ones(2))
    assert len(remembers.records) == 1


def test_what_is_no_sink_is_refused() -> None:
    """At once, not at the first compile."""
    with pytest.raises(TypeError, match="emit"):
        session.add_sink(object())


def test_failing_sink_is_warned_of_once_and_the_others_go_on(remembers: Remembers) -> None:
    """The call is answered, and the record kept."""
    failing = Raises()
    session.add_sink(failing)
    try:
        with pytest.warns(TelemetryWarning, match="sink 'Raises' failed: OSError: disk full"):
            assert compiled(torch.sin, honest)(torch.zeros(2)).sum() == 0
        torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(torch.sin, honest)(torch.zeros(2))
    finally:
        session.remove_sink(failing)
    assert len(remembers.records) == 2


def test_failing_sink_is_no_error_even_where_warnings_are(caplog: Any) -> None:
    """It is in the log, with its traceback."""

    class Unlucky(Raises):
        pass

    failing = Unlucky()
    session.add_sink(failing)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(torch.sin, honest)(torch.zeros(2))
    finally:
        session.remove_sink(failing)
    assert last().chosen == "honest"
    assert "disk full" in caplog.text
    assert "Traceback" in caplog.text


def test_unknown_name_in_the_environment_is_an_error(monkeypatch: Any) -> None:
    """It is the user's own mistake, and never a reason to fall back."""
    monkeypatch.setenv("COMPOSER_SINKS", "loging, smoke_signals")
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.sin, honest)(torch.ones(2))
    error = caught.value.inner_exception
    assert isinstance(error, OptionError)
    assert "'loging'" in str(error)
    assert "did you mean 'logging'" in str(error)
    assert "'smoke_signals'" in str(error)


def test_a_mistake_in_the_environment_waits_for_the_next_compile(monkeypatch: Any) -> None:
    """A call whose engine fails is answered all the same."""
    later = FakeBackend("raises", at=3)
    f, x = compiled(torch.sin, later, honest), torch.ones(2)
    f(x)
    monkeypatch.setenv("COMPOSER_SINKS", "smoke_signals")
    for _ in range(5):
        torch.testing.assert_close(f(x), x.sin())
    assert composer.reports()[-1].runtime.fallbacks == 1
    with pytest.raises(BackendCompilerFailed, match="smoke_signals"):
        compiled(torch.cos, honest)(x)


def test_a_mistake_in_the_environment_reaches_no_call(monkeypatch: Any) -> None:
    """Made after the compile: a later record comes from a call, which has its answer."""

    class Picky:
        def emit(self, record: dict[str, Any]) -> None:
            raise OptionError("COMPOSER_TELEMETRY_MAX_BYTES is 'much'")

    sinks = Sinks()
    sinks.add(Picky())
    compiled(torch.sin, "aot_eager")(torch.ones(2))
    report = last()
    with pytest.raises(OptionError):
        sinks.emit(report)
    with pytest.warns(TelemetryWarning, match="much"):
        sinks.emit(report, first=False)


def test_logging_sink_writes_a_line_for_every_attempt(caplog: Any) -> None:
    """INFO, by the logger ``composer``."""
    with caplog.at_level(logging.INFO, logger="composer"):
        compiled(torch.sin, engines.raises, honest)(torch.ones(2))
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert lines[0].startswith("graph 1 [0/0]: raises failed (build_failed): no such kernel (0.")
    assert lines[1].startswith("graph 1 [0/0]: honest succeeded (0.")


def plugin(folder: Path, code: str) -> None:
    """A package, installed in ``folder``, with the sink ``elsewhere``."""
    (folder / "plugin.py").write_text(textwrap.dedent(code))
    info = folder / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[composer.sinks]\nelsewhere = plugin:Elsewhere\n")


USER = """
import torch
def honest(gm, example_inputs):
    return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)
f = torch.compile(torch.sin, backend="composer", options={"chain": [honest]})
print(f(torch.zeros(2)).sum().item())
"""


def test_sink_of_another_package_is_on_when_installed(tmp_path: Path, run_python: Any) -> None:
    """An entry point of the group ``composer.sinks``; made once, closed when the process ends."""
    code = """
        class Elsewhere:
            def __init__(self):
                print("made")
            def emit(self, record):
                print("got", record["chosen"])
            def close(self):
                print("closed")
    """
    plugin(tmp_path, code)
    done = run_python(USER, env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.split("\n")[:4] == ["made", "got honest", "0.0", "closed"], done.stderr


def test_sink_that_cannot_be_imported_is_warned_of(tmp_path: Path, run_python: Any) -> None:
    """The program goes on without it."""
    plugin(tmp_path, "import no_such_sdk")
    done = run_python(USER, env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.strip() == "0.0", done.stderr
    assert "TelemetryWarning: the sink 'elsewhere' failed" in done.stderr
    assert "no_such_sdk" in done.stderr


@pytest.mark.parametrize("name", OWN)
def test_own_sink_is_documented_and_off_until_asked_for(name: str) -> None:
    """Its name alone turns it on; the log is always on, for whoever looks at it."""
    kind = SINKS.get(name)
    assert issubclass(kind, Sink)
    assert kind.__doc__ != Sink.__doc__
    assert kind.wanted(name, frozenset()) is (name == "logging")
    if name != "jsonl":  # wants a path; tests/telemetry/test_jsonl.py
        assert kind.wanted(name, frozenset({name})) is True


def test_own_sinks_modules_import_no_optional_package(fresh_python: Any) -> None:
    """They are imported when the sink is made, so that others may look at its class."""
    optional = {"opentelemetry", "prometheus_client", "jinja2", "filelock"}
    modules = ", ".join(place.partition(":")[0] for place in OWN.values())
    code = f"import {modules}, sys; print({optional} & set(sys.modules))"
    done = fresh_python(code)
    assert done.stdout.strip() == "set()", done.stderr


def test_forked_child_shows_no_step_of_its_parent() -> None:
    """The thread that compiles is the parent's."""
    progress, began, ends = Progress(), threading.Event(), threading.Event()
    request: Any = SimpleNamespace(number=1, model="Net", nodes=1)

    def compiles() -> None:
        with progress.step(request, "slow"):
            began.set()
            ends.wait(30)

    thread = threading.Thread(target=compiles)
    thread.start()
    assert began.wait(30)

    def looks() -> None:
        assert progress.now() == ()

    assert in_child(looks) == 0
    (step,) = progress.now()
    assert step.what == "slow"
    ends.set()
    thread.join()


def test_progress_shows_what_is_being_compiled() -> None:
    """Graph, model, candidate, and for how long; nothing when it is over."""
    seen = []

    def looks(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.extend(session.current().progress.now())
        return honest(gm, example_inputs)

    compiled(torch.nn.Linear(2, 2), looks)(torch.ones(2))
    (step,) = seen
    assert (step.number, step.what, step.nodes) == (1, "looks", 1)
    assert step.model.endswith("Linear")
    assert step.seconds > 0
    assert session.current().progress.now() == ()
