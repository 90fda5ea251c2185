"""``freeze``: which weights engines take in, and that a change of one is never missed."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools

import pytest
import torch
from common import compiled, last, upstream
from torch._inductor import config as inductor_config
from weight_changes import CHANGES, assign_data, load_state_dict, update_in_place

import composer
from composer import _torch
from composer.backends import inductor_freezing
from composer.lowering.weights.samples import Samples

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_no_grad")]

FREEZING = {"backend": "inductor", "options": {"freezing": True}}


@pytest.fixture
def _no_grad():
    with torch.no_grad():
        yield


def two_linears() -> torch.nn.Module:
    """Products alone: Inductor has no kernel to compile for them."""
    up, down = (torch.nn.Linear(*sizes, bias=False) for sizes in ((8, 16), (16, 4)))
    return torch.nn.Sequential(up, down).eval()


def write_unseen(model) -> None:
    """Around torch's version counter: only who reads the weight at each call answers by it."""
    model[0].weight.detach().numpy()[:] += 1


def frozen() -> int | None:
    """How many weights Inductor took in, as the record says."""
    return last().attempts[-1].engine.get("frozen")


@pytest.mark.parametrize(
    ("engine", "freeze"),
    [
        *itertools.product(["inductor", "onnxrt"], ["auto", True, False]),
        ("openvino", False),
    ],
)
def test_weights_are_read_at_every_call_unless_they_are_taken_in(
    monkeypatch: pytest.MonkeyPatch, engine: str, freeze
) -> None:
    """ONNX engines take them in unless told not to, Inductor only when told to."""
    monkeypatch.setattr(Samples, "show_a_write", lambda self: False)
    if engine == "openvino" and importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    model, x = two_linears(), torch.randn(3, 8)
    f = compiled(model, engine, freeze=freeze, on_exhausted="raise")
    before = f(x)
    torch.testing.assert_close(before, model(x))
    write_unseen(model)
    taken_in = freeze is True or (freeze == "auto" and engine != "inductor")
    torch.testing.assert_close(f(x), before if taken_in else model(x))
    composer.refresh()
    torch.testing.assert_close(f(x), model(x))


@pytest.mark.parametrize("engine", ["inductor", "onnxrt"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_never_stale(engine: str, change) -> None:
    """The very next call answers by them, without a fallback."""
    model, x = two_linears(), torch.randn(3, 8)
    f = compiled(model, engine, freeze=True, on_runtime_error="raise")
    before = f(x)
    change(model)
    torch.testing.assert_close(f(x), model(x))
    assert not torch.allclose(f(x), before)
    assert last().chosen == engine


@pytest.mark.parametrize("change", [update_in_place, load_state_dict, assign_data])
def test_inductors_own_freezing_is_never_stale(change) -> None:
    """Where it is on for the process, torch's own code answers by the old weights for ever."""
    model, x = two_linears(), torch.randn(3, 8)
    with inductor_config.patch(freezing=True):
        f = compiled(model, "inductor")
        f(x)
        assert frozen() == 2
        change(model)
        torch.testing.assert_close(f(x), model(x))


@pytest.mark.parametrize(
    ("candidate", "freeze", "taken_in"),
    [("inductor", False, None), (FREEZING, False, 2), (FREEZING, "auto", 2)],
)
def test_false_turns_inductors_own_freezing_off(candidate, freeze, taken_in) -> None:
    """For this graph, and unless the candidate's options ask for it."""
    model, x = two_linears(), torch.randn(3, 8)
    with inductor_config.patch(freezing=True):
        f = compiled(model, candidate, freeze=freeze)
        torch.testing.assert_close(f(x), model(x))
    assert frozen() == taken_in


@pytest.mark.parametrize("freeze", ["auto", False])
def test_a_candidate_that_wants_freezing_has_its_weights_taken_in(freeze) -> None:
    """Torch alone takes in what the graph holds, which is nothing; and here they are watched."""
    model, x = two_linears(), torch.randn(3, 8)
    f = compiled(model, FREEZING, freeze=freeze)
    torch.testing.assert_close(f(x), model(x))
    assert frozen() == 2
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.testing.assert_close(f(x), model(x))


def test_a_candidate_that_does_not_want_freezing_has_none() -> None:
    """Its own option wins over the policy."""
    own = {"backend": "inductor", "options": {"freezing": False}}
    compiled(two_linears(), own, freeze=True)(torch.randn(3, 8))
    assert frozen() is None


def test_with_grad_on_nothing_is_taken_in() -> None:
    """Training goes on as without it."""
    model, x = two_linears(), torch.randn(3, 8)
    with torch.enable_grad():
        f = compiled(model, "inductor", freeze=True)
        f(x).sum().backward()
        write_unseen(model)
        torch.testing.assert_close(f(x), model(x))
    assert frozen() is None


@pytest.fixture
def made(monkeypatch) -> list[bool]:
    """Whether each thing made was to be frozen; graphs run as they are, in Inductor's place."""
    frozen: list[bool] = []

    def compile_nothing(gm, example_inputs, config):
        frozen.append(config["freezing"])
        return gm.forward

    monkeypatch.setattr(inductor_freezing, "_compile", compile_nothing)
    return frozen


def test_a_weight_that_keeps_changing_becomes_an_input(made) -> None:
    """Code is not compiled for ever; where no weight is left, it is not frozen any more."""
    model, x = two_linears(), torch.randn(3, 8)
    f = compiled(model, "inductor", freeze=True)
    for _ in range(4):
        torch.testing.assert_close(f(x), model(x))
        for weight in model.parameters():
            weight.add_(0.1)
    assert made == [True, True, False]


def test_a_weight_rounded_to_bf16_that_keeps_changing_becomes_an_input(made) -> None:
    """Its copy is one weight that changes, not a new one each time."""
    model, x = two_linears(), torch.randn(3, 8)
    f = compiled(model, "inductor", freeze=True, precision="bf16")
    for _ in range(4):
        for _ in range(4):
            torch.testing.assert_close(f(x), model(x), rtol=0.05, atol=0.05)
        for weight in model.parameters():
            weight.add_(0.1)
    assert made == [True, True, False]


def test_statistics_that_an_eager_forward_moves_are_seen(made) -> None:
    """Torch does so without a version; the count of batches beside them tells."""
    model, x = torch.nn.Sequential(torch.nn.BatchNorm1d(8)).eval(), torch.randn(3, 8)
    f = compiled(model, "inductor", freeze=True)
    f(x)
    assert (frozen(), made) == (4, [True])
    model.train()(x)
    model.eval()
    torch.testing.assert_close(f(x), model(x))
    assert made == [True, True]


def test_code_made_anew_takes_other_sizes_too() -> None:
    """It has the symbols of the captured graph."""
    model = two_linears()
    f = compiled(model, "inductor", freeze=True, dynamic=True)
    f(torch.randn(3, 8))
    model[0].weight.mul_(2)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(f(x), model(x))
    assert len(composer.reports()) == 1


def test_a_small_bias_that_stands_in_the_code_is_never_stale() -> None:
    """Inductor's cache tells code with one bias from code with another."""
    model, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    f = compiled(model, "inductor", freeze=True)
    f(x)
    model.bias.add_(1)
    torch.testing.assert_close(f(x), model(x))


def test_a_number_that_stands_in_the_code_is_never_stale() -> None:
    """Inductor's cache (torch 2.13) does not tell code with one from code with another."""

    class Scale(torch.nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.tensor(by))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by.exp() + 1

    x = torch.randn(64)
    for by in (1.0, -3.0):
        model = Scale(by)
        f = compiled(model, "inductor", freeze=True)
        torch.testing.assert_close(f(x), model(x))
        model.by.add_(1)
        torch.testing.assert_close(f(x), model(x))


def test_what_was_taken_in_goes_with_the_weight() -> None:
    """Neither composer nor torch's cache of code keeps it alive."""

    def held() -> int:
        gc.collect()
        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
        return sum(tuple(each.shape) == (37, 31) for each in tensors)

    model = torch.nn.Sequential(torch.nn.Linear(31, 37, bias=False)).eval()
    f = compiled(model, "inductor", freeze=True)
    f(torch.randn(3, 31))
    first = held()
    model[0].weight = torch.nn.Parameter(torch.randn(37, 31))
    f(torch.randn(3, 31))
    assert held() == first


def test_two_instances_of_a_module_share_code_and_not_weights() -> None:
    """Dynamo compiles their code once; each has its own weights taken in."""
    x = torch.randn(3, 8)
    first, second = torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(8, 4, bias=False)

    def both(model):
        return model(x)

    f = compiled(both, "inductor", freeze=True)
    for model in (first, second, first):
        torch.testing.assert_close(f(model), model(x))


def test_a_weight_that_is_returned_stays_the_models() -> None:
    """The caller is given the very parameter."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 8))

        def forward(self, x):
            return x @ self.weight.T, self.weight

    model, x = Tied(), torch.randn(3, 8)
    y, weight = compiled(model, "inductor", freeze=True)(x)
    torch.testing.assert_close(y, model(x)[0])
    assert weight is model.weight


def test_weights_rounded_to_bf16_are_taken_in_and_watched() -> None:
    """The copies are what is folded in; a change of a weight makes another copy."""
    model, x = two_linears(), torch.randn(3, 8)
    f = compiled(model, "inductor", freeze=True, precision="bf16", on_runtime_error="raise")
    f(x)
    assert frozen() == 2
    model[0].weight.mul_(2)
    torch.testing.assert_close(f(x), model(x), rtol=0.05, atol=0.05)


class Tables(torch.nn.Module):
    """Some of its outputs are computed from weights alone, or from no more than sizes of inputs."""

    def __init__(self):
        super().__init__()
        self.weight, self.norm = torch.nn.Parameter(torch.randn(64)), torch.nn.BatchNorm1d(64)

    def forward(self, x):
        twice = self.weight * 2
        y = self.norm(x)
        y += twice
        like = torch.zeros_like(x[0]) + self.weight
        return y, twice, like, self.norm.weight.view(8, 8) * 2, torch.arange(5.0) * 2


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("engine", ["inductor", "onnxrt", "openvino"])
def test_an_output_of_weights_alone_belongs_to_the_caller(engine: str, training: bool) -> None:
    """Who may write to it: the next call answers by the weights."""
    if engine == "openvino":
        pytest.importorskip("openvino")
    model, x = Tables().train(training), torch.randn(3, 64)
    f = compiled(model, engine, freeze=True, on_exhausted="raise")
    for _ in range(3):
        got = f(x)
        torch.testing.assert_close(got, model(x))
        for each in got[1:]:
            each.zero_()


@upstream
def test_what_inductor_folds_it_gives_out(monkeypatch) -> None:
    """The quirk behind ``constants_kept_apart``; when this fails, it can go."""
    monkeypatch.setattr(_torch.inductor, "constants_kept_apart", contextlib.nullcontext)
    model, x = Tables().eval(), torch.randn(3, 64)
    f = compiled(model, "inductor", freeze=True)
    assert f(x)[1].data_ptr() == f(x)[1].data_ptr()


def test_a_view_of_a_weight_that_is_returned_is_the_models() -> None:
    """What is written to it is written to the weight."""
    linear, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    f = compiled(lambda x: (linear(x), linear.weight.T), "inductor", freeze=True)
    for _ in range(2):
        y, weight = f(x)
        torch.testing.assert_close(y, linear(x))
        weight.mul_(2)
    torch.testing.assert_close(weight, linear.weight.T)
