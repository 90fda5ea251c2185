"""Graphs taken in part: the regions are right, what is left runs in place, and both are told."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from common import compiled, in_threads, last, needs_torch
from torch.fx.experimental.proxy_tensor import make_fx

import composer
from composer.build import current_build
from composer.lowering.devices import devices_of, elsewhere
from composer.lowering.partition.regions import is_compute
from composer.testing import FakeBackend

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]


def bessel_in_the_middle(x, w):
    y = torch.relu(x @ w) + 1
    z = torch.special.bessel_j0(y)  # no ONNX translation
    return torch.sigmoid(z @ w) * y, z


def test_a_refused_operator_runs_in_place_and_is_told() -> None:
    """Coverage, the operator, why, and the user's line; the numbers are eager's."""
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    result = compiled(bessel_in_the_middle, "onnxrt")(x, w)
    torch.testing.assert_close(result, bessel_in_the_middle(x, w))
    (attempt,) = last().attempts
    assert attempt.status == "succeeded"
    assert attempt.coverage == 20 / 21  # of 336 operations, 256 of them of the products
    (line,) = attempt.engine["left_to_torch"]
    assert line.startswith("prims.bessel_j0.default (no ONNX translation) at ")
    assert line.endswith(f"test_regions.py:{bessel_in_the_middle.__code__.co_firstlineno + 2}")


def test_less_than_min_coverage_is_declined() -> None:
    """With the share and the operators, and the next candidate serves."""
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    chain = [{"backend": "onnxrt", "min_coverage": 0.96}, "aot_eager"]
    compiled(bessel_in_the_middle, *chain)(x, w)
    attempt, chosen = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "low_coverage")
    assert attempt.message.startswith("the engine takes 95.2% of the graph's work, not prims.")
    assert "bessel_j0" in attempt.message
    assert chosen.backend == "aot_eager"


AWAY = {
    "made there": (lambda x: (x.sin() + 1, torch.ones(3, device="meta")), "aten.ones.default"),
    "brought there": (lambda x: (x.sin(), (x * 2).to("meta")), "aten._to_copy.default"),
    "like one here": (lambda x: (x.sin(), x.new_zeros(3, device="meta")), "aten.new_zeros.default"),
    "computed there": (lambda x: x.sin().cos().to("meta") + 1, "aten.add.Tensor"),
}


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("case", AWAY)
def test_what_is_on_another_device_stays_torchs(case: str, engine: str) -> None:
    """An engine would leave it where its inputs are."""
    if engine == "openvino":
        pytest.importorskip("openvino")
    function, operator = AWAY[case]
    x = torch.randn(2)
    results, expected = compiled(function, engine, min_coverage=0.0)(x), function(x)
    assert [each.device for each in results] == [each.device for each in expected]
    (attempt,) = last().attempts
    assert attempt.status == "succeeded"
    left = attempt.engine["left_to_torch"]
    assert any(line.startswith(f"{operator} (a tensor on another device)") for line in left)


def test_constants_on_the_cpu_are_an_engines_wherever_it_computes() -> None:
    """Unless they are returned; what is brought to the CPU is not the engine's."""

    def f(x):
        two, three = torch.full((), 2.0, device="cpu"), torch.full((), 3.0, device="cpu")
        return x * two, three, x.cos().cpu()

    home = torch.device("meta")
    gm = make_fx(f, tracing_mode="fake")(torch.ones(2, device=home))
    found = [node.target for node in gm.graph.nodes if node in elsewhere(gm, home)]
    aten = torch.ops.aten
    assert found == [aten.full.default, aten._to_copy.default]
    assert [node.args[1] for node in gm.graph.nodes if node.target is aten.full.default] == [2, 3]


def test_a_triton_kernel_of_the_programs_counts_as_computing() -> None:
    """What it gives are tensors by name, and what an engine leaves of it to torch is told."""
    graph = torch.fx.Graph()
    kernel = graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_functional, ())
    kernel.meta["val"] = {"out": torch.ones(2)}
    assert is_compute(kernel)


def test_a_number_passed_as_a_tensor_is_on_no_device_of_the_graph() -> None:
    """Dynamo's are on the CPU wherever the graph is; where nothing else is there, it is there."""
    number, tensor = torch.tensor(1e-5), torch.ones(2, device="meta")
    assert devices_of([number, 3, tensor, tensor]) == [torch.device("meta")]
    assert devices_of([number, 3]) == [torch.device("cpu")]
    assert devices_of([torch.ones(1), tensor]) == [torch.device("cpu"), torch.device("meta")]


@pytest.mark.parametrize(("least", "chosen"), [(0.0, "onnxrt"), (0.5, "onnxrt"), (1.0, "eager")])
def test_min_coverage_of_the_policy_holds_for_every_candidate(least: float, chosen: str) -> None:
    """Half of this graph can be taken."""
    f = compiled(lambda x: torch.special.bessel_j0(x) + 1, "onnxrt", min_coverage=least)
    x = torch.randn(5)
    torch.testing.assert_close(f(x), torch.special.bessel_j0(x) + 1)
    assert last().chosen == chosen


@pytest.mark.parametrize("least", [-0.1, 1.1, "half"])
def test_min_coverage_is_a_share(least) -> None:
    """Anything else is the user's slip."""
    with pytest.raises(Exception, match="min_coverage"):
        compiled(torch.sin, "onnxrt", min_coverage=least)(torch.ones(2))


def test_sizes_may_change_around_a_refused_operator() -> None:
    """Symbols cross the cut as integers."""
    run = compiled(bessel_in_the_middle, "onnxrt", dynamic=True)
    for rows in (3, 5, 8):
        x, w = torch.randn(rows, 4), torch.randn(4, 4)
        torch.testing.assert_close(run(x, w), bessel_in_the_middle(x, w))
    assert len(composer.reports()) == 1
    assert last().chosen == "onnxrt"


def rows_above(x, w):
    y = torch.relu(x @ w)
    rows = torch.nonzero(y[:, 0] > 0.5).squeeze(-1)
    return y.index_add(0, rows, y[rows] @ w), y.sum(0) + y[rows].sum(0), rows


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
def test_sizes_that_only_the_data_tell_stay_torchs(engine: str) -> None:
    """Whatever they are, none included; the engine takes what does not depend on them."""
    if engine == "openvino":
        pytest.importorskip("openvino", reason="the engine itself")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(rows_above, engine, min_coverage=0.0)
        x, w = torch.randn(6, 4), torch.randn(4, 4)
        for each in (x, -x, torch.zeros(6, 4), torch.ones(6, 4)):
            torch.testing.assert_close(run(each, w), rows_above(each, w), check_stride=True)
    (report,) = composer.reports()
    (attempt,) = report.attempts
    assert report.chosen == engine, attempt.message
    assert 0 < attempt.coverage < 1
    names = {line.partition(" ")[0] for line in attempt.engine["left_to_torch"]}
    assert "aten.nonzero.default" in names
    assert all(
        "(a size that only the data tell)" in each for each in attempt.engine["left_to_torch"]
    )


def test_a_literal_that_tells_a_size_stays_torchs() -> None:
    """What it makes is known, and the graph has a symbol for its size all the same."""

    def repeated(x, w):
        return torch.repeat_interleave(x, torch.tensor([1, 2, 3]), 0) @ w, torch.relu(x @ w)

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(repeated, "onnxrt", min_coverage=0.0)
        torch.testing.assert_close(run(x, w), repeated(x, w))
    assert last().chosen == "onnxrt", last().attempts[0].message


def test_sizes_that_only_the_data_tell_in_training() -> None:
    """They cross from the forward to the backward; on the last input there are no such rows."""
    run = compiled(rows_above, "onnxrt", min_coverage=0.0)
    x, w = torch.randn(6, 4), torch.randn(4, 4)
    with torch.enable_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for each in (x, -x, torch.zeros(6, 4)):
            grads = []
            for function in (rows_above, run):
                weight = w.clone().requires_grad_()
                first, second, _ = function(each, weight)
                (first.square().sum() + second.sum()).backward()
                grads.append(weight.grad)
            torch.testing.assert_close(*grads)
    assert {report.chosen for report in composer.reports()} == {"onnxrt"}


def test_changed_weights_are_seen_in_every_region() -> None:
    """Each region binds its own."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

        def forward(self, x):
            return torch.relu(self.down(torch.special.bessel_j0(self.up(x))))

    model, x = Net(), torch.randn(3, 4)
    run = compiled(model, "onnxrt")
    run(x)
    for layer in (model.up, model.down):
        layer.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))
    assert last().chosen == "onnxrt"


@needs_torch("2.13", "AOTAutograd loses what is there to raise")
@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "wrong"),
    [(torch.linalg.cholesky, -torch.eye(3)), (torch.linalg.inv, torch.zeros(3, 3))],
)
@torch.no_grad()
def test_an_operator_that_is_there_to_raise_does(function, wrong, dynamic, engine) -> None:
    """Nothing reads what it gives."""
    run = compiled(lambda x: function(x) * 2, engine, dynamic=dynamic, min_coverage=0.0)
    good = torch.eye(3) * 4
    torch.testing.assert_close(run(good), function(good) * 2)
    assert last().chosen == engine
    with pytest.raises(torch.linalg.LinAlgError):
        run(wrong)
    torch.testing.assert_close(run(good), function(good) * 2)


def test_a_branch_stays_torchs() -> None:
    """A nested graph has no translation here; what is around it is taken."""

    def branch(x):
        y = torch.exp(x) * 2 + 1
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)) * 2

    x = torch.ones(3)
    torch.testing.assert_close(compiled(branch, "onnxrt")(x), branch(x))
    (attempt,) = last().attempts
    assert attempt.status == "succeeded"
    assert "cond" in attempt.engine["left_to_torch"][0]


VIEWS = {
    "a view and what it looks at": lambda x: (y := x * 2, y[1:], y.t(), y.t()[0]),
    "two views of a hidden value": lambda x: ((y := x + 1)[:2], y[1:]),
    "a part with gaps": lambda x: (x * 2)[:, :2],
    "every other column": lambda x: (x * 2)[:, ::2],
    "an expanded row": lambda x: (x[:1] + 1).expand(3, 4),
    "a diagonal": lambda x: (x + 1).diagonal(),
    "pieces": lambda x: (x + 1).split(2, dim=1),
    "a view of an input": lambda x: (x.view(-1)[2:7], x + 1),
    "an input itself": lambda x: (x, x + 1),
    "the same twice": lambda x: (y := x + 1, y),
    "a view used inside and returned": lambda x: ((y := x + 1).t(), y.t() @ y),
    "transposed": lambda x: (x * 2).t(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
def test_returned_views_are_eagers(function, dynamic: bool) -> None:
    """Values, strides, and which outputs share memory."""
    x = torch.randn(3, 4)
    result = compiled(function, "onnxrt", dynamic=dynamic)(x)
    expected = function(x)
    torch.testing.assert_close(result, expected, check_stride=True)
    assert memory(result, x) == memory(expected, x)
    assert last().chosen == "onnxrt", last().attempts[0].message


def memory(outputs, x) -> list[list[bool]]:
    """Which of the input and the outputs share memory with which."""
    tensors = [x, *(outputs if isinstance(outputs, tuple) else (outputs,))]
    places = [each.untyped_storage().data_ptr() for each in tensors]
    return [[a == b for b in places] for a in places]


def test_one_compiled_graph_serves_several_threads() -> None:
    """Each call has its own inputs and outputs."""
    w = torch.randn(32, 32)
    run = compiled(lambda x: torch.tanh(x @ w) @ w, "onnxrt")
    run(torch.randn(8, 32))
    wrong = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(50):
                x = torch.randn(8, 32, generator=generator)
                if not torch.allclose(run(x), torch.tanh(x @ w) @ w, atol=1e-4, rtol=1e-4):
                    wrong.append(seed)

    in_threads(work, range(4))
    assert wrong == []


def test_views_of_inputs_that_share_memory_are_torchs() -> None:
    """As of chunks of one tensor."""
    base = torch.randn(4, 8)
    first, second = base[:2], base[2:]

    def f(a, b):
        return a.t(), torch.relu(b) + 1

    got = compiled(f, "onnxrt")(first, second)
    torch.testing.assert_close(got, f(first, second))
    assert got[0].data_ptr() == first.data_ptr()
    assert last().chosen == "onnxrt"


def test_parts_of_one_tensor_train() -> None:
    """What is saved for their backward are the inputs themselves."""
    with torch.enable_grad():
        base = torch.randn(4, 8, requires_grad=True)
        compiled(lambda a, b: a * b, "onnxrt")(base[:2], base[2:]).sum().backward()
    torch.testing.assert_close(base.grad[:2], base[2:].detach())
    assert last().chosen == "onnxrt"


def test_regions_that_differ_in_what_a_size_is_of_are_not_one_model(monkeypatch) -> None:
    """Two parts are equal but for which symbol the number that they divide by is."""
    models = []
    partition = sys.modules["composer.lowering.partition.by_trial"]
    made = partition.to_onnx
    monkeypatch.setattr(
        partition, "to_onnx", lambda *args: models.append(made(*args)) or models[-1]
    )

    def f(x, y, v):
        n = x.shape[0]
        for t in (x, y):
            v = torch.special.bessel_j0(torch.relu(t + v).sum(0) / n + v)
        return v

    given = torch.randn(5, 8), torch.randn(9, 8), torch.randn(8)
    torch.testing.assert_close(compiled(f, "onnxrt", dynamic=True)(*given), f(*given))
    assert len({id(each.model) for each in models}) == len(models) == 2


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
@pytest.mark.parametrize("told", [7.0, -0.1, math.nan])
def test_coverage_that_is_no_share_fails_the_engine_that_tells_it(told: float) -> None:
    """A record would hold what its schema does not allow."""

    def engine(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        current_build().facts.coverage = told
        return FakeBackend()(gm, example_inputs)

    compiled(torch.sin, engine, "aot_eager")(torch.ones(2))
    first, _ = last().attempts
    assert (first.status, first.reason) == ("failed", "build_failed")
    assert first.message == f"coverage is a share, 0.0 to 1.0, not {told!r}"
