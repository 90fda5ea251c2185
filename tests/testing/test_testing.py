"""``composer.testing``: each fake engine has its fault, and expectations say what was seen."""

from __future__ import annotations

import pytest
import torch
from common import compiled, last

from composer.testing import FakeBackend, Fault, expect


def test_fake_without_a_fault_is_an_honest_engine() -> None:
    """It compiles, it is accepted, its numbers are eager's."""
    fake = FakeBackend()
    f = compiled(torch.nn.functional.gelu, fake)
    x = torch.randn(4, requires_grad=True)
    with expect(graphs=1, served_by="fake_honest", succeeded=1, calls=2, fallbacks=0):
        torch.testing.assert_close(f(x), torch.nn.functional.gelu(x))
        f(x).sum().backward()
    assert (fake.compiles, fake.calls) == (1, 2)
    assert x.grad is not None


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("raises", "failed", "build_failed"),
        ("out_of_memory", "failed", "out_of_memory"),
        ("returns_none", "rejected", "returned_original"),
        ("returns_graph", "rejected", "returned_original"),
        ("mutates_graph", "failed", "build_failed"),
    ],
)
def test_fault_while_compiling_ends_the_attempt(fault: str, status: str, reason: str) -> None:
    """The eager fallback answers, with eager's numbers."""
    x = torch.randn(3)
    with expect(graphs=1, served_by="eager", reasons={reason: 1}, **{status: 1}):
        assert torch.equal(compiled(torch.sin, FakeBackend(fault))(x), x.sin())


def test_slow_fault_takes_its_time() -> None:
    """While compiling, or at a call."""
    compiled(torch.sin, FakeBackend("slow", seconds=0.05))(torch.ones(2))
    assert last().attempts[0].seconds >= 0.05
    torch.compiler.reset()
    compiled(torch.sin, FakeBackend("slow", at=1, seconds=0.5))(torch.ones(2))
    assert last().runtime.seconds >= 0.5 > last().attempts[0].seconds


def test_exit_passes_through() -> None:
    """A ``SystemExit`` of this process is the user's to see."""
    with pytest.raises(SystemExit):
        compiled(torch.sin, FakeBackend("exits"))(torch.ones(2))


@pytest.mark.parametrize("fault", ["os_exits", "segfaults"])
def test_fault_that_ends_the_process_ends_it(fault: str, run_python) -> None:
    """In a child, or the tests would end as well."""
    done = run_python(
        "import torch; from composer.testing import FakeBackend\n"
        f"options = {{'chain': [FakeBackend({fault!r})]}}\n"
        "torch.compile(torch.sin, backend='composer', options=options)(torch.ones(2))\n"
        "print('still here')"
    )
    assert done.returncode in (3, -11)
    assert "still here" not in done.stdout


@pytest.mark.parametrize("fault", ["nan", "wrong_value", "wrong_shape", "wrong_dtype"])
def test_wrong_answer_is_given_from_the_named_call_on(fault: str) -> None:
    """Honest before, wrong from then on."""
    f = compiled(torch.sin, FakeBackend(fault, at=3))
    x = torch.randn(2, 3)
    answers = [f(x) for _ in range(4)]
    right = [a.shape == x.shape and a.dtype == x.dtype and torch.equal(a, x.sin()) for a in answers]
    assert right == [True, True, False, False]


def test_wrong_stride_has_the_right_values() -> None:
    """Only the memory is laid out another way."""
    x = torch.randn(2, 3)
    answer = compiled(torch.sin, FakeBackend("wrong_stride"))(x)
    assert torch.equal(answer, x.sin())
    assert answer.stride() != x.sin().stride()


def test_backward_that_fails_lets_the_forward_be() -> None:
    """The first call's answer is eager's."""
    x = torch.randn(3, requires_grad=True)
    answer = torch.compile(torch.sin, backend=FakeBackend("fails_in_backward"))(x)
    assert torch.equal(answer, x.sin())
    with pytest.raises(RuntimeError, match="made to raise"):
        answer.sum().backward()


def test_mutation_of_inputs_raises_their_version() -> None:
    """As an operation of torch's own would."""
    x = torch.ones(3)
    before = x._version
    compiled(torch.sin, FakeBackend("mutates_inputs", at=1))(x)
    assert x._version > before
    assert x.sum() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fault": "explodes"}, "unknown fault 'explodes'"),
        ({"fault": "rases"}, "did you mean 'raises'"),
        ({"fault": "raises", "at": 0}, "the first being 1"),
        ({"fault": "mutates_graph", "at": 2}, "not at a call"),
    ],
)
def test_fake_that_cannot_be_is_a_mistake(arguments: dict, said: str) -> None:
    """Named at once."""
    with pytest.raises(ValueError, match=said):
        FakeBackend(**arguments)


def test_every_fault_can_be_made() -> None:
    """And has a name in reports."""
    assert {FakeBackend(fault).__name__ for fault in Fault} == {f"fake_{f}" for f in Fault}


def test_expectation_that_fails_says_what_was_seen() -> None:
    """Every slip, and why the engines were not taken."""
    options = {"graphs": 2, "served_by": {"onnxrt": 1}, "failed": 0, "reasons": {"timeout": 1}}
    with pytest.raises(AssertionError) as caught, expect(**options):
        compiled(torch.sin, FakeBackend("raises"))(torch.ones(2))
    said = str(caught.value)
    for part in (
        "graphs: expected 2, saw 1",
        "served_by: expected {'onnxrt': 1}, saw {'eager': 1}",
        "failed: expected 0, saw 1",
        "reason timeout: expected 1, saw 0",
        "graph 1 [0/0]: fake_raises failed (build_failed): fake_raises was made to raise",
    ):
        assert part in said


def test_expectation_of_an_unknown_count_is_a_mistake() -> None:
    """Rather than a count that is never seen."""
    with pytest.raises(TypeError, match="knows no falied"), expect(falied=1):
        pass


def test_expectation_does_not_hide_an_error_of_the_test() -> None:
    """What is raised within passes through."""
    with pytest.raises(ZeroDivisionError), expect(graphs=5):
        1 / 0  # noqa: B018
