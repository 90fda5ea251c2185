"""Each engine proves itself once a version, and is refused with one reason where it cannot."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

import pytest
import torch
from common import compiled, last
from typer.testing import CliRunner

import composer
from composer import session
from composer.backends import onnxrt
from composer.chain import selftest
from composer.cli import app
from composer.policy import Candidate
from composer.records import Attempt


@pytest.fixture(autouse=True)
def another_process() -> Callable[[], None]:
    """Forgets that engines have proved themselves, as a new process does not know it."""
    forget = session.current().knowledge._memory.clear
    forget()
    return forget


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines that were tried on the small graphs."""
    names: list[str] = []
    run_all = selftest.run_all

    def counting(candidate: Candidate, device: str) -> object:
        names.append(candidate.name)
        return run_all(candidate, device)

    monkeypatch.setattr(selftest, "run_all", counting)
    return names


def test_cache_list_shows_what_became_of_an_engine() -> None:
    """A line for each engine that was tried."""
    attempt_of("onnxrt")
    listed = CliRunner().invoke(app, ["cache", "list", "selftests", "--json"])
    assert listed.exit_code == 0, listed.output
    (entry,) = json.loads(listed.output)["entries"]
    assert entry["what"] == "onnxrt  works with the installed versions"


def fails(*args: object) -> object:
    raise TypeError("from_dlpack(): incompatible function arguments")


def attempt_of(chain: object, function: object = torch.relu) -> Attempt:
    torch.compiler.reset()
    with torch.no_grad():
        compiled(function, chain, "eager")(torch.ones(3))
    return last().attempts[0]


@pytest.mark.parametrize("chain", ["onnxrt", "openvino"])
def test_engine_that_works_is_tried_once(
    chain: str, tried: list[str], another_process: Callable[[], None]
) -> None:
    """Neither another graph nor another process, whose session is new, pays for it again."""
    for function in (torch.relu, torch.sin):
        assert attempt_of(chain, function).status == "succeeded"
        another_process()
    assert tried == [chain]


def test_engine_that_does_not_work_is_refused_with_one_reason(
    tried: list[str], another_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the versions, the error and the command that tries again."""
    monkeypatch.setattr(onnxrt.loading, "make_session", fails)
    for function in (torch.relu, torch.sin):
        attempt = attempt_of("onnxrt", function)
        assert (attempt.status, attempt.reason) == ("unavailable", "engine_incompatible")
        another_process()
    assert tried == ["onnxrt"]
    for said in (f"torch {torch.__version__}", "onnxruntime 1.", "from_dlpack", "composer doctor"):
        assert said in attempt.message


@pytest.mark.parametrize("version", ["torch", "engine"])
def test_other_versions_are_tried_anew(
    version: str,
    tried: list[str],
    another_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one release got wrong, the next may have right."""
    attempt_of("onnxrt")
    another_process()
    if version == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    else:
        monkeypatch.setattr(onnxrt.OnnxRuntimeEngine, "identity", lambda self: "another release")
    attempt_of("onnxrt")
    assert tried == ["onnxrt", "onnxrt"]


@pytest.mark.parametrize("where", ["candidate", "table"])
def test_wrong_option_does_not_switch_the_engine_off(
    where: str, another_process: Callable[[], None]
) -> None:
    """The mistake stays the attempt's own reason, and a later process uses the engine."""
    wrong = {"providers": ["CUDAExecutionProvider"]}
    on_cpu = {"backend": "onnxrt", "options": wrong} if where == "candidate" else "onnxrt"
    with composer.using({"backends": {"onnxrt": wrong}} if where == "table" else None):
        assert attempt_of(on_cpu).reason == "wrong_provider"
        assert attempt_of(on_cpu, torch.cos).reason == "wrong_provider"
    another_process()
    assert attempt_of("onnxrt", torch.sin).status == "succeeded"


def test_limit_of_a_candidate_does_not_hide_an_engine_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, another_process: Callable[[], None]
) -> None:
    """The small graphs are tried even if the candidate is for other graphs only."""
    monkeypatch.setattr(onnxrt.loading, "make_session", fails)
    for_relu = {"backend": "onnxrt", "when": {"model": "*relu*"}}
    torch.compiler.reset()
    with torch.no_grad():
        compiled(torch.relu, for_relu, "eager", model="relu")(torch.ones(3))
    assert last().attempts[0].reason == "engine_incompatible"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("no room"), "out_of_memory"),
        (OSError(errno.ENOSPC, "no space left on device"), "build_failed"),
    ],
)
def test_passing_trouble_says_nothing_of_the_versions(
    error: Exception,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    another_process: Callable[[], None],
) -> None:
    """It is the attempt's own reason, and is not kept."""

    def lacks(*args: object) -> object:
        raise error

    with monkeypatch.context() as for_a_moment:
        for_a_moment.setattr(onnxrt.loading, "make_session", lacks)
        assert attempt_of("onnxrt").reason == reason
    another_process()
    assert attempt_of("onnxrt", torch.sin).status == "succeeded"


@pytest.mark.parametrize(
    "error",
    [ModuleNotFoundError("no module named 'torch._x'"), OSError("undefined symbol: x")],
)
def test_library_that_cannot_be_loaded_is_incompatible(
    error: Exception, monkeypatch: pytest.MonkeyPatch, another_process: Callable[[], None]
) -> None:
    """As a rule it is of another version."""

    def lacks(*args: object) -> object:
        raise error

    monkeypatch.setattr(onnxrt.loading, "make_session", lacks)
    assert attempt_of("onnxrt").reason == "engine_incompatible"


def test_doctor_replaces_the_outcome_that_is_kept(
    monkeypatch: pytest.MonkeyPatch, another_process: Callable[[], None]
) -> None:
    """An engine that was mended in place, with the same version, is used again."""
    with monkeypatch.context() as broken:
        broken.setattr(onnxrt.loading, "make_session", fails)
        attempt_of("onnxrt")
    another_process()
    assert attempt_of("onnxrt").reason == "engine_incompatible"
    selftest.in_child(b'{"engine": "onnxrt", "device": "cpu"}', lambda: None)
    another_process()
    assert attempt_of("onnxrt").status == "succeeded"


def test_small_graphs_do_not_see_the_modes_of_the_program() -> None:
    """Nor its default device, which is another one here."""
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        tried = selftest.run_all(Candidate(backend="onnxrt"), "cpu")
    attempts = {name: each.attempt for name, each in tried.items()}
    assert {name: each.status for name, each in attempts.items()} == {
        "inference": "succeeded",
        "training": "succeeded",
    }
    assert 0.9 < (attempts["inference"].coverage or 0) < 1  # one function is left to torch
    assert attempts["training"].engine["verified"]["against"] == "eager"
