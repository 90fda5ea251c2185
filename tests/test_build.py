"""What an engine is asked and what it answers: ``BuildRequest`` and ``Build``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import compiled, last

from composer import Reason, Status
from composer.backends.base import Backend, Build, BuildFacts, BuildRequest, current_build
from composer.build import BuildTerms, building
from composer.errors import Refusal, refuse
from composer.system.subprocesses import Limits

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")


def honest(request: BuildRequest) -> Any:
    backend = torch._dynamo.lookup_backend("aot_eager")
    return backend(request.gm, request.example_inputs)


class Told(Backend):
    """Answers with facts of its own."""

    def build(self, request: BuildRequest) -> Build:
        facts = BuildFacts(versions={"told": "1.2"}, threads=3, extra={"kernels": 7})
        facts.covers(1, 2, ["aten.sin (no kernel)"])
        return Build(honest(request), facts)


class Bare(Backend):
    """Answers with a callable alone, and fills in the facts that it was handed."""

    def build(self, request: BuildRequest) -> Any:
        request.terms.facts.device = "a card"
        return honest(request)


class Fails(Backend):
    """Says what it is, and then fails."""

    def build(self, request: BuildRequest) -> Build:
        request.terms.facts.versions["told"] = "1.2"
        request.terms.facts.covers(1, 4)
        refuse(Status.FAILED, Reason.BUILD_FAILED, "no such kernel")


@pytest.mark.parametrize("coverage", [1.5, -1, float("nan"), "most"])
@pytest.mark.parametrize("fails", [True, False])
def test_wrong_fact_of_an_engine_that_fails_leaves_its_own_reason(
    coverage: object, fails: bool
) -> None:
    """A wrong fact is the reason only where there is no other."""

    class Boasts(Backend):
        def build(self, request: BuildRequest) -> Any:
            request.terms.facts.coverage = coverage  # type: ignore[assignment]  # that is tested
            if fails:
                refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, "no kernel for aten.sin")
            return honest(request)

    compiled(torch.sin, Boasts)(torch.ones(2))
    (attempt,) = last().attempts
    own = ("unsupported_op", "no kernel for aten.sin")
    wrong = ("build_failed", f"coverage is a share, 0.0 to 1.0, not {coverage!r}")
    assert (attempt.reason, attempt.message) == (own if fails else wrong)
    assert attempt.coverage is None


def test_facts_of_an_answer_stand_in_the_record() -> None:
    """Typed ones by their names, and what is extra beside them."""
    compiled(torch.sin, Told)(torch.ones(2))
    (attempt,) = last().attempts
    left = ["aten.sin (no kernel)"]
    said = {"told": "1.2", "threads": 3, "left_to_torch": left, "kernels": 7}
    assert (attempt.coverage, attempt.engine) == (0.5, said)


def test_a_callable_by_itself_is_an_answer() -> None:
    """The facts are those of the request."""
    compiled(torch.sin, Bare)(torch.ones(2))
    assert last().chosen == "Bare"
    assert last().attempts[0].engine == {"device": "a card"}


def test_an_attempt_that_fails_has_what_was_said_by_then() -> None:
    """Coverage and versions help to see why."""
    compiled(torch.sin, Fails, "eager")(torch.ones(2))
    failed, _ = last().attempts
    assert (failed.status, failed.coverage, failed.engine) == ("failed", 0.25, {"told": "1.2"})


def test_facts_of_the_graphs_of_one_build_are_added_up() -> None:
    """With a later pass a backend is given the forward and the backward one by one."""

    def nothing(graph: torch.fx.Graph) -> None:
        """A pass of the stage ``post_grad``."""

    nothing.stage = "post_grad"  # type: ignore[attr-defined]
    x = torch.ones(2, requires_grad=True)
    compiled(torch.sin, Told, passes=[nothing])(x).sum().backward()
    (attempt,) = last().attempts
    assert attempt.coverage == 0.5
    assert attempt.engine["left_to_torch"] == ["aten.sin (no kernel)"]


def test_terms_hold_for_functions_that_dynamo_calls() -> None:
    """Within the build; outside of one there are no limits."""
    terms = BuildTerms(limits=Limits(timeout=0.0), precision="bf16")
    with building(terms):
        assert current_build() is terms
        with pytest.raises(Refusal, match="was stopped after"):
            current_build().check_time()
    current_build().check_time()
    assert current_build().precision == "fp32"
