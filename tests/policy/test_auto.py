"""``chain = "auto"``: every engine of composer's that is installed, and what was not tried."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace

import pytest
import torch
from common import compiled, last
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer import backends
from composer.backends import ENGINES, installed_for
from composer.backends.dynamo import CallableBackend
from composer.backends.openvino import OpenVinoEngine
from composer.chain.candidates import ONLY_TABLES
from composer.errors import FallbackWarning, OptionError, refuse
from composer.policy import Facts
from composer.policy.resolution import resolve
from composer.records import Reason, Status
from composer.testing import FakeBackend

HINT = 'options={"chain": "auto", "select": "fastest"} compares them'


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two engines in the place of composer's own; a third is not installed."""

    class Absent(CallableBackend):
        def probe(self, request: object) -> None:
            refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, "not here")

    first, second = CallableBackend(FakeBackend()), CallableBackend(FakeBackend())
    found = {"first": first, "absent": Absent(FakeBackend()), "second": second}
    usual = backends.find_backend
    monkeypatch.setattr(backends, "ENGINES", tuple(found))
    monkeypatch.setattr(backends, "find_backend", lambda name: found.get(name) or usual(name))
    monkeypatch.setattr("composer.chain.candidates.find_backend", backends.find_backend)
    return ["first", "second"]


def tried() -> list[str]:
    return [attempt.backend for attempt in last().attempts]


def test_order_is_that_of_the_contract() -> None:
    """TensorRT, OpenVINO, ONNX Runtime, Inductor."""
    assert ENGINES == ("tensorrt", "openvino", "onnxrt", "inductor")


@torch.no_grad()
def test_auto_is_what_is_installed_and_can_serve_the_device() -> None:
    """The first of them serves, where nothing is measured."""
    compiled(torch.sin, chain="auto")(torch.ones(3))
    first = "openvino" if importlib.util.find_spec("openvino") else "onnxrt"
    assert (last().chosen, tried()) == (first, [first])


def test_auto_tries_engines_in_their_order(fakes: list[str]) -> None:
    """Those that are not here are no attempts."""
    compiled(torch.sin, chain="auto", select="fastest")(torch.ones(3))
    assert tried() == fakes


@pytest.mark.parametrize("select", ["first", "fastest"])
def test_engine_whose_probe_has_a_fault_is_an_attempt_that_failed(
    select: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user is warned of it, and the next engine serves."""

    def breaks(self: object, request: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'meta'")

    monkeypatch.setattr(backends, "ENGINES", ("openvino", "onnxrt"))
    monkeypatch.setattr(OpenVinoEngine, "probe", breaks)
    with pytest.warns(FallbackWarning, match="no attribute 'meta'"), torch.no_grad():
        compiled(torch.sin, chain="auto", select=select)(torch.ones(3))
    attempt = last().attempts[0]
    assert (attempt.backend, attempt.status, attempt.reason) == (
        "openvino",
        "failed",
        "build_failed",
    )
    assert tried() == ["openvino", "onnxrt"]


def test_auto_in_a_table_and_in_a_list(fakes: list[str]) -> None:
    """Its limits are those of each engine, and others may stand beside it."""
    composer.configure({"backends": {"aot_eager": {}}})
    chain = [{"backend": "auto", "when": {"device": "cuda"}}, "aot_eager"]
    compiled(torch.sin, chain=chain)(torch.ones(3))
    composer.configure(None)
    assert tried() == [*fakes, "aot_eager"]
    assert [str(each.status) for each in last().attempts] == ["skipped", "skipped", "succeeded"]


def test_options_of_engines_hold_under_auto(fakes: list[str]) -> None:
    """``[backends.NAME]`` is for every candidate of that name."""
    chain = resolve(
        Facts("", "cpu", "float32", training=False, dynamic=False),
        replace(ONLY_TABLES, installed=lambda: ["onnxrt", "inductor"]),
        options={"chain": "auto"},
        configured={"backends": {"onnxrt": {"threads": 1}}},
    ).policy.chain
    assert [(each.name, each.options) for each in chain] == [
        ("onnxrt", {"threads": 1}),
        ("inductor", {}),
    ]


def test_max_autotune_without_a_chain_is_the_fastest_of_all(fakes: list[str]) -> None:
    """With a chain it is the fastest of that."""
    x = torch.ones(3)
    torch.compile(torch.sin, backend="composer", mode="max-autotune")(x)
    assert tried() == fakes
    assert "timing" in last().attempts[0].engine or last().attempts[0].reason == "slower"
    with composer.using(chain=["second"]):
        torch.compile(torch.cos, backend="composer", mode="max-autotune")(x)
    assert tried() == ["second"]


def test_variables_compare_all_that_is_installed(
    fakes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the program says."""
    monkeypatch.setenv("COMPOSER_CHAIN", "auto")
    monkeypatch.setenv("COMPOSER_SELECT", "fastest")
    compiled(torch.sin, "aot_eager", select="first")(torch.ones(3))
    assert tried() == fakes
    assert last().policy == ("options", "COMPOSER_CHAIN", "COMPOSER_SELECT")


def test_a_wrong_word_for_the_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variable, since whoever reads it did not write the program."""
    monkeypatch.setenv("COMPOSER_SELECT", "quickest")
    said = "COMPOSER_SELECT is 'quickest', and should be first or fastest"
    with pytest.raises(BackendCompilerFailed, match=said) as caught:
        compiled(torch.sin, "eager")(torch.ones(3))
    assert isinstance(caught.value.inner_exception, OptionError)


def test_report_ends_with_the_engines_that_were_not_tried(fakes: list[str]) -> None:
    """Where it is short, and what compares them."""
    compiled(torch.sin, chain="auto")(torch.ones(3))
    line = f"installed and not tried: second; {HINT}"
    assert str(composer.report()).splitlines()[-1] == line
    for size in range(2, 12):
        compiled(torch.cos, chain="auto", dynamic=False)(torch.ones(size))
        torch.compiler.reset()
    assert HINT not in str(composer.report())
    assert HINT in str(composer.report(last=1))
    composer.reset()
    assert HINT not in str(composer.report())


def test_report_says_nothing_of_engines_where_the_chain_is_the_users(fakes: list[str]) -> None:
    """Nor where all that is installed was compared, or is about to be."""
    x = torch.ones(3)
    compiled(torch.sin, "first")(x)
    compiled(torch.cos, chain="auto", select="fastest")(x)
    assert HINT not in str(composer.report())
    compiled(torch.tan, chain="auto", select={"by": "fastest", "background": True})(x)
    assert HINT not in str(composer.report())


@torch.no_grad()
def test_an_engine_that_refuses_the_graph_is_not_installed_for_it() -> None:
    """OpenVINO has no backward."""
    seen = []

    def looks(gm, example_inputs):
        from composer.graphs import capture

        seen.append(installed_for(capture.read_request(gm, example_inputs)))
        return gm.forward

    with torch.enable_grad():
        compiled(torch.sin, looks)(torch.ones(3, requires_grad=True))
    assert seen == [("onnxrt", "inductor")]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"select": "fastest"}, "honest"),
        ({"select": "fastest", "verify": "off"}, "wrong"),
        ({"select": "fastest", "verify": {"rtol": 1e-3}}, "honest"),
        ({"verify": "compile"}, "honest"),
        ({}, "wrong"),
    ],
)
def test_who_lets_composer_choose_gets_compared_numbers(options, chosen: str) -> None:
    """A chain that the user wrote, of which the first is taken, is taken as it is."""

    def wrong(gm, example_inputs):
        return lambda *args: [args[0] + 1]

    def honest(gm, example_inputs):
        def run(*args):
            time.sleep(0.01)
            return gm.forward(*args)

        return run

    f = compiled(lambda x: large_products(x), wrong, honest, **options)
    x = torch.randn(300, 300)
    f(x)
    assert last().chosen.rpartition(".")[2] in (chosen, "eager" if chosen == "honest" else chosen)
    reasons = [attempt.reason for attempt in last().attempts]
    assert ("numeric_mismatch" in reasons) == (chosen == "honest")


def large_products(x: torch.Tensor) -> torch.Tensor:
    """Slow in eager, so that an engine that does nothing is the fastest."""
    for _ in range(8):
        x = x @ x
        x = x / x.norm()
    return x


def test_numbers_are_compared_under_auto_unless_told_otherwise(fakes: list[str]) -> None:
    """So do ``mode="max-autotune"`` and the switch on call; ``off`` turns it off."""
    graph = Facts("m", "cpu", "float32", training=False, dynamic=False)
    finders = replace(ONLY_TABLES, installed=lambda: fakes)
    for mode, options, when in [
        (None, {"chain": "auto"}, "compile"),
        (None, {"chain": "auto", "verify": "off"}, "off"),
        (None, {"chain": "auto", "verify": "sample"}, "sample"),
        (None, {"chain": ["onnxrt"], "verify": {"every": 7}}, "off"),
        (None, {"chain": ["onnxrt"]}, "off"),
        ("max-autotune", {}, "compile"),
        ("max-autotune", {"verify": "off"}, "off"),
    ]:
        resolved = resolve(graph, finders, mode, options)
        assert resolved.policy.verify.when == when, (mode, options)
