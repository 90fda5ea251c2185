"""One engine called with the weights of several modules: a session for each, while it lives."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from common import compiled

from composer.backends.onnxrt import loading
from composer.lowering.partition import by_trial
from composer.lowering.weights import bindings
from composer.lowering.weights.statistics import find_witnesses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines, in the order they were made."""
    engines: list[Any] = []
    original = by_trial.bind

    def keep(*args: Any) -> Any:
        engines.append(original(*args))
        return engines[-1]

    monkeypatch.setattr(by_trial, "bind", keep)
    return engines


def session_of(bound: Any) -> Any:
    """The session that was made for a set of weights."""
    return bound.keeps[0]


def fed(bound: Any) -> int:
    """How many arguments the session gets at each call."""
    return len(session_of(bound).get_inputs())


class Layer(torch.nn.Module):
    """A convolution and a batch norm, which ONNX Runtime folds into it."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class Layers(torch.nn.Module):
    """As many layers as asked for, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def two() -> tuple[list[Layer], list[Any], torch.Tensor]:
    """Two modules, compiled and called, and an input."""
    models, x = [Layer().eval(), Layer().eval()], torch.randn(3, 8, 5, 5)
    functions = [compiled(each, "onnxrt") for each in models]
    for function in functions:
        function(x)
    return models, functions, x


def test_two_modules_stay_bound_while_they_alternate(made) -> None:
    """One engine, a session for each, none made anew."""
    models, functions, x = two()
    (engine,) = made
    before = engine.bounds
    for _ in range(4):
        for model, function in zip(models, functions, strict=True):
            torch.testing.assert_close(function(x), model(x))
    assert len(before) == 2
    assert engine.bounds == before
    assert [*map(fed, before)] == [1, 1]


def test_layers_compiled_one_by_one_stay_bound(made) -> None:
    """Regional compilation: one engine and one export for them all."""
    model, x = Layers(6).eval(), torch.randn(3, 8, 5, 5)
    expected = model(x)
    for layer in model.layers:
        layer.compile(backend="onnxrt")
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)
    (engine,) = made
    assert len(engine.bounds) == 6


@pytest.mark.parametrize("which", [0, 1])
def test_a_module_that_dies_takes_its_session_along(made, which: int) -> None:
    """Weights, memory and session; the other module's stay."""
    models, functions, x = two()
    (engine,) = made
    session = weakref.ref(session_of(engine.bounds[which]))
    weight = weakref.ref(models[which].conv.weight)
    memory = weakref.ref(models[which].conv.weight.untyped_storage())
    del models[which], functions[which]
    gc.collect()
    assert (session(), weight(), memory()) == (None, None, None)
    assert len(engine.bounds) == 1
    torch.testing.assert_close(functions[0](x), models[0](x))


def test_a_change_in_place_leaves_the_other_bound(made) -> None:
    """Only the changed module's session is made anew."""
    models, functions, x = two()
    (engine,) = made
    first, second = engine.bounds
    models[0].conv.weight.mul_(2)
    for model, function in zip(models, functions, strict=True):
        torch.testing.assert_close(function(x), model(x))
    assert first not in engine.bounds
    assert second in engine.bounds
    assert len(engine.bounds) == 2


def test_a_restless_weight_of_one_module_stays_bound_in_the_other(made) -> None:
    """Changes are counted for each set."""
    models, functions, x = two()
    for _ in range(4):
        models[0].conv.weight.mul_(1.1)
        for model, function in zip(models, functions, strict=True):
            torch.testing.assert_close(function(x), model(x))
    assert sorted(map(fed, made[0].bounds)) == [1, 2]


def test_a_replaced_parameter_takes_the_old_session_along(made) -> None:
    """The set with the new one is bound in its place."""
    models, functions, x = two()
    session = weakref.ref(session_of(made[0].bounds[1]))
    models[1].conv.weight = torch.nn.Parameter(torch.randn(8, 8, 3, 3))
    assert session() is None
    torch.testing.assert_close(functions[1](x), models[1](x))
    assert len(made[0].bounds) == 2


def test_weights_replaced_at_every_call_become_inputs(made, monkeypatch) -> None:
    """After two sets died, a new one is taken in when it comes back."""
    model, x = Layer().eval(), torch.randn(3, 8, 5, 5)
    function = compiled(model, "onnxrt")
    original, sessions = loading.make_session, []
    monkeypatch.setattr(
        loading, "make_session", lambda *args: sessions.append(1) or original(*args)
    )
    for _ in range(6):
        torch.testing.assert_close(function(x), model(x))
        model.conv.weight = torch.nn.Parameter(torch.randn(8, 8, 3, 3))
    assert len(sessions) == 3  # bound twice, and once without weights
    for _ in range(4):
        torch.testing.assert_close(function(x), model(x))
    assert len(sessions) == 4
    assert [*map(fed, made[0].bounds)] == [1]


def test_a_cache_of_fixed_address_is_an_input(made) -> None:
    """It changes at every call; taken in, it would have the session made anew each time."""
    layer, cache = torch.nn.Linear(4, 4), {"keys": torch.randn(4, 4)}
    torch._dynamo.mark_static_address(cache["keys"])
    function = compiled(lambda x, cache: layer(x) @ cache["keys"], "onnxrt")
    for _ in range(2):
        x = cache["keys"].copy_(torch.randn(4, 4)) + 1
        torch.testing.assert_close(function(x, cache), layer(x) @ cache["keys"])
    assert [*map(fed, made[0].bounds)] == [2]


def test_sets_beyond_the_bound_are_inputs(made, monkeypatch) -> None:
    """Those that are bound stay so, and room comes with the death of one."""
    monkeypatch.setattr(bindings, "_SETS", 1)
    models, functions, x = two()
    (engine,) = made
    (first,) = engine.bounds
    torch.testing.assert_close(functions[1](x), models[1](x))
    assert engine.bounds == [first]
    del models[0], functions[0], first
    gc.collect()
    torch.testing.assert_close(functions[0](x), models[0](x))
    assert [*map(fed, engine.bounds)] == [1]


def test_statistics_of_the_second_module_are_watched() -> None:
    """By a witness of their own, which the graph made for the first does not know."""
    models, functions, x = two()
    for _ in range(2):
        models[1].train()(torch.randn(16, 8, 5, 5) * 3 + 1)
        models[1].eval()
        torch.testing.assert_close(functions[1](x), models[1](x))
    torch.testing.assert_close(functions[0](x), models[0](x))


def test_only_one_owner_makes_a_witness() -> None:
    """A tensor that two batch norms write to has no witness; what none owns needs none."""
    norm, other = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    other.running_var = norm.running_var
    tensors = dict(enumerate((norm.running_mean, norm.running_var, torch.ones(4))))
    assert find_witnesses(tensors) == {0: norm.num_batches_tracked, 1: None}


def test_threads_call_with_two_sets_at_once(made) -> None:
    """Each gets its own weights' result, also while one of them changes."""
    models, functions, x = two()

    def work(which: int) -> None:
        with torch.no_grad():
            for turn in range(200):
                if which == 0 and turn % 100 == 0:
                    models[0].conv.weight.mul_(1.5)
                torch.testing.assert_close(functions[which](x), models[which](x))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
    assert len(made[0].bounds) == 2
