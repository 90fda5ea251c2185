"""The record: its committed schema, its way through JSON, its live counters."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import engines
import jsonschema
import pytest
import torch
from common import compiled, last
from engines import honest
from rewrites import Raises, Scale, at

from composer import CompileReport
from composer.chain import verify
from composer.errors import RecordError
from composer.records import Counters, Runtime
from composer.telemetry import schema
from composer.testing import FakeBackend


@pytest.mark.skipif(
    "description" not in schema.generated()["$defs"]["Attempt"],
    reason="before 2.13 pydantic takes no descriptions over from dataclasses",
)
def test_committed_schema_is_what_the_records_are() -> None:
    """If this fails: ``python -m composer.telemetry.schema`` into ``record.schema.json``.

    A field that goes, or changes its meaning, wants a new version of the schema as well.
    """
    assert schema.committed() == schema.generated()


def test_schema_says_what_every_field_means() -> None:
    """Of the record and of each of its parts."""
    tables = [schema.committed(), *schema.committed()["$defs"].values()]
    fields = [item for table in tables for item in table.get("properties", {}).items()]
    assert len(fields) > 40
    assert [name for name, field in fields if not field.get("description")] == []


def test_record_of_a_compile_holds_to_the_schema() -> None:
    """With passes, a failed and an accepted attempt, a symbol and calls."""
    f = compiled(torch.cos, engines.raises, honest, passes=[at("torch", Raises), at("aten", Scale)])
    f(torch.ones(2))
    f(torch.ones(3))
    f(torch.ones(4))
    record = json.loads(last().to_json())
    jsonschema.validate(record, schema.committed())
    assert all(record[part] for part in ("passes", "attempts", "inputs"))
    record["attempts"][0]["status"] = "won"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, schema.committed())


def test_record_survives_json() -> None:
    """What is read back is equal, its counters too."""
    f = compiled(torch.nn.Linear(3, 3), engines.raises, honest)
    f(torch.ones(2, 3))
    read = CompileReport.from_dict(json.loads(last().to_json()))
    assert read == last()
    assert read.attempts[0].status is last().attempts[0].status
    assert read.runtime.read() == last().runtime.read()
    assert read.runtime.calls == 1


def test_reading_a_record_leaves_unknown_fields_out() -> None:
    """A later release may add fields to the same version."""
    compiled(torch.sin, "eager")(torch.ones(2))
    record = {**last().to_dict(), "carbon": 3}
    record["attempts"][0]["mood"] = "good"
    assert CompileReport.from_dict(record) == last()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema 2; this composer reads 1"),
        ({"nodes": "many", "model": None}, "model.*; nodes"),
        ({"attempts": [{"backend": "x", "status": "won"}]}, r"attempts\.0\.status"),
    ],
)
def test_reading_what_is_no_record_names_every_fault(change: dict, said: str) -> None:
    """The version, or each field that is wrong."""
    compiled(torch.sin, "eager")(torch.ones(2))
    with pytest.raises(RecordError, match=said):
        CompileReport.from_dict({**last().to_dict(), **change})


def test_runtime_estimates_the_seconds_within_calls() -> None:
    """The first 16 calls are timed, then one in 16 stands for the others."""

    def slow(gm: torch.fx.GraphModule, _: list) -> object:
        def run(*args: torch.Tensor) -> object:
            time.sleep(0.002)
            return [args[0].sin()]

        return run

    f = compiled(torch.sin, slow)
    x = torch.ones(2)
    started = time.perf_counter()
    for _ in range(64):
        f(x)
    elapsed = time.perf_counter() - started
    counters = last().runtime.read()
    assert counters.calls == 64
    assert 64 * 0.002 <= counters.seconds <= elapsed * 2


def test_compile_within_a_call_is_no_time_of_calls() -> None:
    """The next candidate's, after an engine has failed; it would stand for 16 calls of that."""

    def slowly(gm: torch.fx.GraphModule, example_inputs: list) -> object:
        time.sleep(1.0)
        return honest(gm, example_inputs)

    f = compiled(torch.sin, FakeBackend("raises", at=3), slowly)
    for _ in range(40):
        f(torch.ones(2))
    assert (last().chosen, last().runtime.read().calls) == ("slowly", 40)
    assert 0 < last().runtime.seconds < 0.5


def test_comparison_within_a_call_is_no_time_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's own answer is."""
    judge = verify.judge

    def slowly(*args: Any) -> Any:
        time.sleep(0.5)
        return judge(*args)

    monkeypatch.setattr(verify, "judge", slowly)
    f = compiled(torch.sin, FakeBackend(seconds=0.0), verify={"when": "sample", "every": 2})
    for _ in range(5):
        f(torch.ones(2))
    assert last().runtime.verified == 2
    assert 0 < last().runtime.seconds < 0.4


def test_a_runtime_is_shown_by_its_counters() -> None:
    """Those of now."""
    runtime = Runtime(Counters(calls=5))
    runtime.tick()
    assert repr(runtime) == f"Runtime({Counters(calls=6)})"


def test_runtime_loses_no_call_between_threads() -> None:
    """Eight threads, a reader beside them."""
    runtime = Runtime(Counters(calls=5))

    def run() -> None:
        for _ in range(20_000):
            runtime.tick()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert runtime.calls >= 5
    assert runtime.calls == 5 + 8 * 20_000
