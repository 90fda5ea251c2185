"""The sink ``prometheus``, scraped over loopback and read by prometheus-client's own parser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import prometheus_client
import pytest
import torch
from common import compiled, last
from engines import honest, raises
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from recordings import taken_over

from composer import session
from composer.telemetry.prometheus import PrometheusSink
from composer.testing import settle


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """With composer's series in it."""
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    session.add_sink(sink)
    yield registry
    session.remove_sink(sink)


def scraped(registry: CollectorRegistry) -> dict[str, dict[tuple[str, ...], float]]:
    """What a server shows: name of a sample, values of its labels by their names, number."""
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            labels = tuple(value for _, value in sorted(each.labels.items()))
            samples.setdefault(each.name, {})[labels] = each.value
    return samples


@pytest.mark.slow
def test_attempts_in_the_background_are_counted_when_they_are_made(
    registry: CollectorRegistry,
) -> None:
    """Until then each of them counts as skipped."""
    select = {"by": "first", "background": True}
    f = compiled(torch.sin, raises, honest, select=select, isolate=True)
    for _ in range(2):
        f(torch.ones(2))
    settle()
    f(torch.ones(2))
    assert scraped(registry)["composer_attempts_total"] == {
        ("raises", "policy", "skipped"): 1,
        ("honest", "policy", "skipped"): 1,
        ("raises", "build_failed", "failed"): 1,
        ("honest", "", "succeeded"): 1,
    }


def test_scrape_shows_attempts_and_compile_times(registry: CollectorRegistry) -> None:
    """By backend, reason and status; by who serves the graph."""
    f = compiled(torch.sin, raises, honest)
    f(torch.ones(2))
    f(torch.ones(2, dtype=torch.float64))
    samples = scraped(registry)
    assert samples["composer_attempts_total"] == {
        ("raises", "build_failed", "failed"): 2,
        ("honest", "", "succeeded"): 2,
    }
    assert samples["composer_compile_seconds_count"] == {("honest",): 2}
    assert samples["composer_compile_seconds_sum"]["honest",] > last().seconds
    buckets = [float(le) for _, le in samples["composer_compile_seconds_bucket"]]
    assert (min(buckets), sorted(buckets)[-2:]) == (0.01, [600, float("inf")])


def test_scrape_shows_the_calls_as_they_stand(registry: CollectorRegistry) -> None:
    """Read from the live graphs, without another compile."""
    f = compiled(torch.sin, honest)
    f(torch.ones(2))
    assert scraped(registry)["composer_runtime_calls_total"] == {("honest",): 1}
    for _ in range(4):
        f(torch.ones(2))
    samples = scraped(registry)
    assert samples["composer_runtime_calls_total"] == {("honest",): 5}
    assert samples["composer_runtime_fallbacks_total"] == {("honest",): 0}
    assert samples["composer_runtime_seconds_total"]["honest",] > 0


def test_record_of_a_graph_taken_over_counts_no_attempt_twice(registry: CollectorRegistry) -> None:
    """Nor its compile."""
    compiled(torch.sin, raises, honest)(torch.ones(2))
    session.current().sinks.emit(taken_over(last(), "other"), first=False)
    samples = scraped(registry)
    assert samples["composer_attempts_total"] == {
        ("raises", "build_failed", "failed"): 1,
        ("honest", "", "succeeded"): 1,
        ("other", "", "succeeded"): 1,
    }
    assert samples["composer_compile_seconds_count"] == {("honest",): 1}


def test_second_sink_on_a_registry_is_refused_until_the_first_is_closed() -> None:
    """With an error that says what to do; nothing is left half registered."""
    registry = CollectorRegistry()
    first = PrometheusSink(registry)
    with pytest.raises(ValueError, match=r"close\(\) the sink"):
        PrometheusSink(registry)
    first.close()
    first.close()
    assert scraped(registry) == {}
    prometheus_client.Counter("composer_runtime_calls", "Somebody else's.", registry=registry)
    with pytest.raises(ValueError, match="another registry"):
        PrometheusSink(registry)
    assert list(scraped(registry)) == [
        "composer_runtime_calls_total",
        "composer_runtime_calls_created",
    ]


USER = """
import sys
{first}
import torch
f = torch.compile(torch.sin, backend="composer", options={{"chain": ["aot_eager"]}})
print(f(torch.zeros(2)).sum().item())
{last}
"""


def test_named_in_the_environment_it_fills_the_default_registry(run_python: Any) -> None:
    """That which every server of prometheus-client shows."""
    show = "import prometheus_client as p; print(p.generate_latest().decode())"
    done = run_python(USER.format(first="", last=show), env={"COMPOSER_SINKS": "prometheus"})
    assert 'composer_runtime_calls_total{backend="aot_eager"} 1.0' in done.stdout, done.stderr


def test_multiprocess_mode_has_all_but_the_live_calls(tmp_path: Path, run_python: Any) -> None:
    """Its collector reads files of prometheus-client's own kinds, and no other collector."""
    env = {"COMPOSER_SINKS": "prometheus", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        run_python(USER.format(first="", last=""), env=env)
    show = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    shown = run_python(show, env=env).stdout
    accepted = '{backend="aot_eager",reason="",status="succeeded"} 2.0'
    assert f"composer_attempts_total{accepted}" in shown
    assert 'composer_compile_seconds_count{chosen="aot_eager"} 2.0' in shown
    assert "composer_runtime" not in shown


def test_without_the_package_the_extra_is_named(run_python: Any) -> None:
    """In a warning; the program goes on."""
    code = USER.format(first="sys.modules['prometheus_client'] = None", last="")
    done = run_python(code, env={"COMPOSER_SINKS": "prometheus"})
    assert done.stdout.startswith("0.0"), done.stderr
    assert "pip install 'torch-compile-composer[prometheus]'" in done.stderr
