"""Functions that torch saved: another process loads them, and the graph is compiled without Dynamo.

Here loading in the same process stands for most of it: nothing of the compiled function is shared.
"""

from __future__ import annotations

import functools
import importlib.util
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common import last, needs_torch, thorough
from torch import Tensor, nn

import composer
from composer import _torch

pytestmark = pytest.mark.usefixtures("_switched_on")


@pytest.fixture
def _switched_on() -> Iterator[None]:
    """It is off in torch 2.11."""
    with torch._dynamo.config.patch(enable_aot_compile=True):
        yield


class Normed(nn.Module):
    """Weights, running statistics, a tensor that is neither, and a number among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.scale = torch.full((8,), 2.0)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = torch.relu(self.norm(self.linear(x))) * self.scale + torch.tensor([1.0])
        return {"y": y, "rows": x.shape[0]}


class Convolved(nn.Module):
    """A convolution with a batch norm that folds into it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x))


class Stacked(nn.Module):
    """The gradient of the first layer is made with the weights of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def saved(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The function, compiled ahead of time through composer."""
    ahead = torch.compile(function, backend="composer", fullgraph=True, options=options or None)
    return ahead.aot_compile((args, {}))


def written(function: Any) -> bytes:
    """What torch writes of it."""
    return bytes(type(function).serialize(function).serialized_data)


def loaded(data: bytes) -> Any:
    """The function as another process has it: composer and Dynamo know nothing of it."""
    torch.compiler.reset()
    composer.reset()
    return torch.compiler.load_compiled_function(io.BytesIO(data))


NO_OPENVINO = importlib.util.find_spec("openvino") is None
ENGINES = [
    "onnxrt",
    pytest.param("openvino", marks=pytest.mark.skipif(NO_OPENVINO, reason="not here")),
    pytest.param("inductor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("engine", ["eager", *ENGINES])
@torch.no_grad()
def test_a_loaded_function_computes_the_same(engine: str) -> None:
    """With the weights as they are in the process that loads it, also when they change."""
    model, x = Normed().eval(), torch.randn(4, 8)
    ahead = saved(model.forward, x, chain=[engine], strict=True)
    torch.testing.assert_close(ahead(model, x), model(x))
    function = loaded(written(ahead))
    for _ in range(3):
        x = torch.randn(4, 8)
        torch.testing.assert_close(function(model, x), model(x))
        model.linear.weight.mul_(1.5)
        model.norm.running_mean.add_(1.0)
    assert (last().chosen, last().runtime.calls) == (engine, 3)


@torch.no_grad()
def test_a_loaded_function_needs_no_backend_of_dynamos(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved function names the function that compiles it again."""
    data = written(saved(torch.sin, torch.ones(3), chain=["eager"]))
    monkeypatch.setattr(_torch.dynamo, "lookup_backend", {}.__getitem__)
    torch.testing.assert_close(loaded(data)(torch.ones(3)), torch.ones(3).sin())


@torch.no_grad()
def test_a_loaded_graph_has_the_key_and_finds_what_was_kept() -> None:
    """The model's name as well, which policies match; the exporter is not asked again."""
    model, x = Normed().eval(), torch.randn(4, 8)
    data = written(saved(model.forward, x, chain=["onnxrt"]))
    before = last()
    loaded(data)(model, x)
    after = last()
    assert after is not before
    assert (after.graph_key, after.model) == (before.graph_key, before.model)
    assert after.model == f"{__name__}.Normed"
    assert before.attempts[0].engine["artefacts"] == "kept"
    assert after.attempts[0].engine["artefacts"] == "graph reused"


@torch.no_grad()
def test_statistics_are_taken_in_where_dynamo_cannot_say_whose_they_are() -> None:
    """A batch norm folds into what is before it only if its statistics are the engine's."""
    model, x = Convolved().eval(), torch.randn(1, 3, 8, 8)
    function = loaded(written(saved(model.forward, x, chain=["onnxrt"])))
    torch.testing.assert_close(function(model, x), model(x))
    assert last().attempts[0].engine["nodes"] == {"CPUExecutionProvider": 1}
    model.train()(x)  # moves the statistics, and their versions do not tell
    model.eval()
    torch.testing.assert_close(function(model, x), model(x))


@pytest.mark.parametrize("engine", ["onnxrt", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dynamic_sizes_stay_dynamic(engine: str) -> None:
    """One graph serves them all."""
    model, x = Normed().eval(), torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        function = loaded(written(saved(model.forward, x, chain=[engine], strict=True)))
        for rows in (5, 4, 7):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(function(model, x), model(x))
    assert last().dynamic
    assert len(composer.reports()) == 1


def scaled(x: Tensor, by: float) -> Tensor:
    """A number that Dynamo gives the graph as a tensor, where it is dynamic."""
    return x * by + by


@pytest.mark.parametrize("engine", ["aot_eager", "onnxrt", "inductor"])
@torch.no_grad()
def test_a_number_that_is_dynamic_stays_one(engine: str) -> None:
    """Its ``item`` is the symbol that the graph was captured with, so that nothing restarts."""
    x = torch.randn(4)
    options = {"chain": [engine], "strict": True}
    ahead = torch.compile(
        scaled, backend="composer", fullgraph=True, dynamic=True, options=options
    ).aot_compile(((x, 3.5), {}))
    data = io.BytesIO(written(ahead))
    torch.compiler.reset()
    function = torch.compiler.load_compiled_function(data, f_globals=globals())
    for number in (2.5, 3.5, -1.0):
        torch.testing.assert_close(function(x, number), scaled(x, number))


@pytest.mark.parametrize("engine", ["onnxrt", *thorough("inductor")])
def test_a_loaded_function_trains(engine: str) -> None:
    """Also where the first call is made under ``no_grad``: the graph was captured with grad."""
    model, x = Normed().eval(), torch.randn(4, 8)
    function = loaded(written(saved(model.forward, x, chain=[engine], strict=True)))
    function.disable_guard_check()
    with torch.no_grad():
        torch.testing.assert_close(function(model, x), model(x))
    assert last().training
    function(model, x)["y"].square().sum().backward()
    found = [each.grad for each in model.parameters()]
    model.zero_grad()
    model(x)["y"].square().sum().backward()
    torch.testing.assert_close(found, [each.grad for each in model.parameters()])


def test_a_loaded_function_that_trains_finds_both_models() -> None:
    """AOTAutograd is told what weights are, and so keeps for the backward what it did before."""
    model, x = Stacked(), torch.randn(4, 8)
    data = written(saved(model.forward, x, chain=["onnxrt"], strict=True))
    assert last().attempts[0].engine["artefacts"] == "kept"
    loaded(data)(model, x)
    assert last().attempts[0].engine["artefacts"] == "2 of 2 models reused"


def test_autocast_is_as_it_was() -> None:
    """A graph captured under it is compiled under it."""

    def product(x: Tensor) -> Tensor:
        return x @ x

    x = torch.randn(8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        data = written(saved(product, x, chain=["aot_eager"]))
    function = loaded(data)
    function.disable_guard_check()
    assert function(x).dtype == torch.bfloat16


@torch.no_grad()
def test_the_policy_is_that_of_the_process_that_loads(tmp_path: Path) -> None:
    """Options of ``torch.compile`` are in the file and come on top of it."""
    x = torch.randn(4)
    data = written(saved(torch.relu, x, min_coverage=0.25))
    function = loaded(data)
    with composer.using(chain=["aot_eager"]):
        function(x)
    assert last().chosen == "aot_eager"
    function = loaded(written(saved(torch.relu, x, chain=["onnxrt"])))
    with composer.using(chain=["aot_eager"]):
        function(x)
    assert last().chosen == "onnxrt"


def interpreted(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """An engine that is not composer's."""
    return torch.fx.Interpreter(gm).run


@torch.no_grad()
def test_a_function_that_can_be_imported_may_stand_in_the_chain() -> None:
    """It is written by its name."""
    x = torch.randn(4)
    function = loaded(written(saved(torch.relu, x, chain=[interpreted])))
    torch.testing.assert_close(function(x), torch.relu(x))
    assert last().chosen == "interpreted"


@torch.no_grad()
def test_an_option_that_cannot_be_written_is_named() -> None:
    """At once, where it can still be mended."""
    engine = functools.partial(lambda gm, example_inputs: torch.fx.Interpreter(gm).run)
    with pytest.raises(composer.errors.OptionError, match="option 'chain' cannot be written"):
        saved(torch.relu, torch.randn(4), chain=[engine])


@torch.no_grad()
def test_an_engine_that_is_missing_where_it_is_loaded_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in any compile: the next one serves, and the record says why."""
    x = torch.randn(4)
    data = written(saved(torch.relu, x, chain=["onnxrt", "aot_eager"]))
    function = loaded(data)
    monkeypatch.setattr("composer.backends.onnxrt.OnnxRuntimeEngine.probe", missing)
    with pytest.warns(composer.errors.FallbackWarning, match="gone"):
        torch.testing.assert_close(function(x), torch.relu(x))
    assert [each.status for each in last().attempts] == ["unavailable", "succeeded"]


def missing(*_: object) -> None:
    composer.errors.refuse(composer.Status.UNAVAILABLE, composer.Reason.NOT_INSTALLED, "gone")


def shifted(x: Tensor, y: Tensor) -> Tensor:
    """A write that the other input shows where they share memory."""
    x.add_(1)
    return y * 2


@torch.no_grad()
def test_views_among_the_inputs_and_the_values() -> None:
    """They lead to what only the process has that captured the graph."""

    def parts(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[1:] + 1

    x = torch.randn(4, 8)[:, 2:6]
    function = loaded(written(saved(parts, x, chain=["onnxrt"], strict=True)))
    torch.testing.assert_close(function(x), parts(x))


@torch.no_grad()
def test_inputs_that_share_memory_cannot_be_written() -> None:
    """Rather than a function that answers with what was there before a write."""
    memory = torch.ones(8)
    with pytest.raises(ValueError, match="share memory"):
        saved(shifted, memory[:4], memory[2:6], chain=["aot_eager"])
    memory = torch.ones(4)
    function = loaded(written(saved(shifted, memory, memory, chain=["aot_eager"])))
    assert function(memory, memory).tolist() == [4.0] * 4


@torch.no_grad()
def test_a_branch_that_data_decide_is_saved_with_the_graph() -> None:
    """Graphs within the graph; torch 2.13 cannot read the guards that it writes of them."""

    def either(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    wishes = {"chain": ["aot_eager"], "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    function = loaded(written(saved(either, torch.ones(4), **wishes)))
    for x in (torch.ones(4), -torch.ones(4)):
        torch.testing.assert_close(function(x), either(x))


SAVES = """
import torch, affine, composer
ahead = torch.compile(
    affine.affine, backend="composer", options={"chain": ["onnxrt"]}, fullgraph=True
)
with torch.no_grad():
    ahead = ahead.aot_compile(((torch.zeros(2, 4), torch.zeros(4, 4)), {}))
ahead.save_compiled_function("saved")
print(composer.reports()[-1].attempts[0].engine["artefacts"])
"""
AFFINE = """
import torch
def affine(x, w):
    return torch.relu(x @ w) + 1
"""
LOADS = """
import sys, torch, composer, affine
with open("saved", "rb") as file:
    function = torch.compiler.load_compiled_function(file)
x, w = torch.arange(8.0).reshape(2, 4), torch.ones(4, 4)
with torch.no_grad():
    assert torch.equal(function(x, w), affine.affine(x, w))
(report,) = composer.reports()
print(report.chosen, report.model, report.attempts[0].engine["artefacts"])
print(any(name.startswith("onnxscript") for name in sys.modules))
"""


@needs_torch("2.12", "there is a switch to be set, in both processes")
def test_another_process_loads_it_from_a_file(
    tmp_path: Path, run_python: Callable[..., Any], fresh_python: Callable[..., Any]
) -> None:
    """It finds what was kept of the graph, and imports nothing to translate one."""
    (tmp_path / "affine.py").write_text(AFFINE)
    said = []
    for run, code in ((run_python, SAVES), (fresh_python, LOADS)):
        done = run(code, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        said += done.stdout.splitlines()
    assert said == ["kept", "onnxrt affine.affine graph reused", "False"], done.stderr


def test_torch_still_says_when_it_is_going_to_write() -> None:
    """The setting that ``will_be_saved`` reads, and none of torch's compiles has on otherwise."""
    seen = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append(_torch.files.will_be_saved())
        return gm.forward

    x = torch.randn(4)
    torch.compile(torch.sin, backend=backend)(x)
    with pytest.raises(RuntimeError, match="SerializableCallable"):
        torch.compile(torch.sin, backend=backend, fullgraph=True).aot_compile(((x,), {}))
    assert seen == [False, True]
