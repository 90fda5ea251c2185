"""``composer.testing.check_backend``: engines that keep the contract, and those with one fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from common import thorough
from engines import honest, only_here

import composer
from composer.backends import BACKENDS
from composer.errors import BackendCheckError, OptionError, refuse
from composer.testing import FakeBackend, Fault, check_backend

X = torch.linspace(-1, 1, 12).reshape(4, 3)


def rules(candidate: Any, *program: Any) -> dict[str, str]:
    """The rules that an engine breaks on a small program, with what was found."""
    with pytest.raises(BackendCheckError) as caught:
        check_backend(candidate, *(program or (torch.tanh, (X,))))
    return caught.value.rules


def ignores_its_options(gm: Any, example_inputs: list[Any], *, options: Any = None) -> Any:
    return honest(gm, example_inputs)


def only_inference(gm: Any, example_inputs: list[Any]) -> Any:
    if torch.is_grad_enabled():
        refuse(composer.Status.DECLINED, composer.Reason.TRAINING_GRAPH, "inference only")
    return honest(gm, example_inputs)


class KeepsTheFirstAnswer:
    """Right at the first call, which is verified, and the same again at all later ones."""

    __name__ = "keeps_the_first_answer"

    def __call__(self, gm: Any, example_inputs: list[Any]) -> Any:
        run, kept = honest(gm, example_inputs), []

        def answer(*args: Any) -> Any:
            kept[:] = kept if len(kept) > 1 else [*kept, run(*args)]
            return kept[-1]

        return answer


NAMES = sorted({*BACKENDS.names()} - {"inductor"})


@pytest.mark.parametrize("name", [*NAMES, *thorough("inductor")])
def test_every_registered_engine_keeps_the_contract(name: str) -> None:
    """Those that are here: composer's own, and other packages'."""
    try:
        seen = check_backend(name)
    except BackendCheckError as error:
        if "unavailable" not in error.rules.get("serves", ""):
            raise
        pytest.skip(error.rules["serves"])
    assert seen.graphs >= 6
    assert str(seen).startswith(f"backend {name!r} breaks no rule: it served {seen.graphs} graphs")


def test_honest_engine_keeps_the_contract() -> None:
    """Under grad, with dynamic sizes and in a child process: each on three programs."""
    seen = check_backend(FakeBackend())
    assert (seen.name, seen.graphs, seen.declined) == ("fake_honest", 13, ())


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("raises", "builds"),
        ("os_exits", "process"),
        ("hangs", "process"),
        ("returns_graph", "work"),
        ("nan", "numbers"),
        ("mutates_inputs_and_raises", "calls"),
        ("fails_in_backward", "calls"),
        *thorough(
            ("out_of_memory", "process"),
            ("mutates_graph", "builds"),
            ("exits", "process"),
            ("segfaults", "process"),
            ("eats_memory", "process"),
            ("returns_none", "work"),
            ("wrong_value", "numbers"),
            ("wrong_shape", "numbers"),
            ("wrong_dtype", "numbers"),
            ("wrong_stride", "numbers"),
        ),
    ],
)
def test_fault_is_named_by_its_rule(fault: str, rule: str) -> None:
    """One that would end the process is found in another."""
    table = {"backend": FakeBackend(fault), "timeout": 3, "memory_limit": 512}
    assert list(rules(table)) == [rule]


def test_every_fault_breaks_a_rule_or_is_none() -> None:
    """To take long is none, nor to write to the copies that a build is given."""
    (named,) = [each for each in test_fault_is_named_by_its_rule.pytestmark if each.args]
    told = {getattr(case, "values", case)[0] for case in named.args[1]}
    assert {*Fault} - told == {"slow", "mutates_inputs"}
    assert check_backend(FakeBackend("mutates_inputs"), torch.tanh, (X,)).graphs == 5


def test_error_says_what_was_found_where() -> None:
    """A line for each rule, in plain English."""
    with pytest.raises(BackendCheckError) as caught:
        check_backend(FakeBackend("fails_in_backward"), torch.tanh, (X,))
    assert str(caught.value) == (
        "backend 'fake_fails_in_backward' breaks the rules: calls\n"
        "- calls: fake_fails_in_backward failed (raised_at_runtime): raised when it was run on "
        "the first inputs: the backward was made to raise, in training"
    )


def test_call_that_writes_to_inputs_breaks_the_rule() -> None:
    """What eager leaves alone; a build is given copies."""
    assert "inputs" in rules(FakeBackend("mutates_inputs", at=1))


def test_later_calls_are_compared_as_well() -> None:
    """An engine that has its answer from the first inputs is right on those alone."""
    assert "numbers" in rules(KeepsTheFirstAnswer())


def test_option_that_nobody_knows_is_to_be_refused() -> None:
    """A function that takes options has to look at them; one without is spared by composer."""
    assert list(rules(ignores_its_options)) == ["options"]
    assert check_backend(honest, torch.tanh, (X,)).graphs == 5


def test_engine_that_only_works_in_this_process_is_told_so() -> None:
    """``isolate`` would refuse it always."""
    table = {"backend": only_here, "options": {"pid": os.getpid()}}
    assert "process" in rules(table)


def test_declining_breaks_no_rule() -> None:
    """It is in the result, with the reason; so is what no other process can be sent."""
    seen = check_backend(only_inference, torch.tanh, (X,))
    (declined,) = seen.declined
    assert declined == "only_inference declined (training_graph): inference only, in training"
    assert str(seen).endswith(f"\n- {declined}")
    seen = check_backend(lambda gm, inputs: honest(gm, inputs), torch.tanh, (X,))
    assert "not_isolatable" in seen.declined[0]


def test_engine_that_serves_nothing_breaks_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a check that tries nothing would pass."""

    def declines(gm: Any, example_inputs: list[Any]) -> Any:
        refuse(composer.Status.DECLINED, composer.Reason.UNSUPPORTED_OP, "no such kernel")

    assert "no such kernel" in rules(declines)["serves"]
    assert "not_registered" in rules("nobody_has_this_engine")["serves"]
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    assert "serves" in rules(honest)


def test_policy_file_of_the_folder_says_nothing_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither what else is faster, nor in which precision it is to compute."""
    monkeypatch.chdir(tmp_path)
    table = 'select = { by = "fastest", background = true }\nprecision = "bf16"\nlocked = true'
    Path("composer.toml").write_text(f"version = 1\n[defaults]\n{table}\n")
    check_backend(honest, torch.tanh, (X,))


def test_users_mistake_is_raised_as_it_is() -> None:
    """It says nothing of the engine."""
    with pytest.raises(Exception, match="unknown option 'thread'") as caught:
        check_backend({"backend": "onnxrt", "options": {"thread": 1}}, torch.tanh, (X,))
    assert isinstance(caught.value.inner_exception, OptionError)
