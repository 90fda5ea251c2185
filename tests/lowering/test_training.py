"""Training through ONNX Runtime: losses, gradients and buffers as in eager."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
import zoo
from common import compiled, last, needs_torch, thorough
from torch.utils.checkpoint import checkpoint

import composer
from composer import _torch

pytestmark = pytest.mark.slow

STEPS = 5
T = torch.tensor


def batch(inputs, size: int):
    """The inputs of one example of the zoo, as a batch of ``size`` that differ."""
    return {
        name: torch.randn(size, *each.shape[1:])
        if each.is_floating_point()
        else torch.cat([each.roll(shift, -1) for shift in range(size)])
        for name, each in inputs.items()
    }


def loss_of(model, inputs) -> torch.Tensor:
    outputs = model(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(each.pow(2).mean() for each in outputs)


def gradients(runner, model, inputs, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradient of every parameter that has one."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = loss_of(runner, inputs)
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_trains_alike(model: torch.nn.Module, inputs, *, alike: float = 1e-4) -> None:
    """Five optimizer steps: the loss, every gradient and every buffer within tolerance.

    Gradients are held against the largest of their step, since some are zero but for rounding.
    """
    twin = copy.deepcopy(model)
    fast = compiled(twin, "onnxrt")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.001) for each in (model, twin)]
    for step in range(STEPS):
        expected, grads = gradients(model, model, inputs, step)
        loss, found = gradients(fast, twin, inputs, step)
        torch.testing.assert_close(loss, expected, rtol=alike, atol=0)
        assert found.keys() == grads.keys()
        largest = max(grad.abs().max() for grad in grads.values())
        worst = max((found[name] - grad).abs().max() / largest for name, grad in grads.items())
        assert worst <= alike, f"step {step}: {worst:.1e}"
        for p, q in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(q, p, rtol=alike, atol=alike)
        for optimizer in optimizers:
            optimizer.step()
    assert {report.chosen for report in composer.reports()} == {"onnxrt"}
    assert all(report.training for report in composer.reports())


@pytest.mark.parametrize(
    ("name", "size"), [("bert", 2), ("resnet", 8), *thorough(("t5", 2), ("llama", 2))]
)
def test_public_models_train_as_in_eager(name: str, size: int) -> None:
    """Attention, embeddings, convolutions, batch norm, dropout (whose numbers stay torch's)."""
    model, inputs = zoo.build(name, tiny=True)
    assert_trains_alike(model.train(), batch(inputs, size))


def distance(grads, reference) -> float:
    """The norm of the difference over the norm of the reference, of all gradients together."""
    flat, true = (
        torch.cat([each[n].double().flatten() for n in reference]) for each in (grads, reference)
    )
    return ((flat - true).norm() / true.norm()).item()


@pytest.mark.thorough
def test_mobilenet_trains_as_in_eager() -> None:
    """Depthwise convolutions and many norms, which make rounding grow a thousandfold in each step.

    So every step starts from eager's weights, and all gradients together are held against float64:
    a single one may be far off, in eager as well, where a ReLU6 falls on the other side.
    """
    model, inputs = zoo.build("mobilenet", tiny=True)
    blocks = model.model.mobilenet_v2.layer
    one_of_each_kind = 1, 5, 9, 12, 15  # with a residual, with a stride, wider
    model.model.mobilenet_v2.layer = torch.nn.ModuleList(blocks[i] for i in one_of_each_kind)
    inputs = batch(inputs, 8)
    twin, exact = copy.deepcopy(model.train()), copy.deepcopy(model).double()
    fast = compiled(twin, "onnxrt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in range(STEPS):
        twin.load_state_dict(model.state_dict())
        exact.load_state_dict(model.state_dict())
        _, grads = gradients(model, model, inputs, step)
        ours, found = gradients(fast, twin, inputs, step)
        doubles = {name: each.double() for name, each in inputs.items()}
        true, reference = gradients(exact, exact, doubles, step)
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=0)
        eager, composed = (distance(each, reference) for each in (grads, found))
        assert composed <= max(5e-2, 4 * eager), f"step {step}: {composed:.1e}, eager {eager:.1e}"
        for p, q in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-4)
        optimizer.step()
    assert last().chosen == "onnxrt"


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "masked": {"attn_mask": torch.zeros(1, 1, 5, 5).masked_fill(torch.eye(5) > 0, -torch.inf)},
    "a row masked everywhere": {"attn_mask": torch.zeros(5, 5).index_fill(0, T([1]), -torch.inf)},
}


@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_and_its_gradients(options, heads: int) -> None:
    """Its backward reads the logarithm that the exporter's translation leaves at zero.

    Two heads of the query may share one of key and value.
    """
    args = [torch.randn(2, n, 5, 8, requires_grad=True) for n in (heads, 3, 3)]
    twins = [each.detach().clone().requires_grad_() for each in args]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=True)

    attend(*args).square().sum().backward()
    result = compiled(attend, "onnxrt", min_coverage=1.0)(*twins)
    result.square().sum().backward()
    assert last().chosen == "onnxrt", last().attempts[0].message
    for twin, each in zip(twins, args, strict=True):
        torch.testing.assert_close(twin.grad, each.grad, rtol=1e-4, atol=1e-5)


def test_random_numbers_are_drawn_in_eagers_order() -> None:
    """Regions move what depends on nothing, but not what draws from torch's generator."""

    def drop(x, y):
        late = F.dropout(torch.tanh(x @ x), 0.5)
        early = F.dropout(y, 0.3)
        return F.dropout(torch.sin(early @ early) + late, 0.1)

    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    run = compiled(drop, "onnxrt", min_coverage=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = drop(x, y)
        torch.manual_seed(seed)
        torch.testing.assert_close(run(x, y), expected)
    assert last().chosen == "onnxrt"


def test_what_a_checkpoint_draws_is_left_to_torch_and_told() -> None:
    """The partitioner wraps it, so that the backward draws the same once more."""

    def drop(x):
        return torch.tanh(F.dropout(torch.sin(x), 0.5))

    assert_checkpointed_alike(drop)


def test_noise_of_a_checkpoint_is_drawn_again_for_its_backward() -> None:
    """The partitioner says nothing of the value of what draws one tensor there (torch 2.13)."""

    def disturb(x):
        return torch.tanh(torch.rand_like(x) * torch.sin(x))

    assert_checkpointed_alike(disturb)


def assert_checkpointed_alike(body) -> None:
    """Result, gradient and the next random number as in eager, by the engine and by torch."""

    def program(x):
        return checkpoint(body, x * 3, use_reentrant=False)

    x = torch.randn(4, 8, requires_grad=True)
    expected, found = [], []
    for run, results in ((program, expected), (compiled(program, "onnxrt"), found)):
        torch.manual_seed(7)
        result = run(x)
        results += [result, *torch.autograd.grad(result.sum(), x), torch.rand(1)]
    torch.testing.assert_close(found, expected)
    (attempt,) = last().attempts
    assert last().chosen == "onnxrt", attempt.message
    assert attempt.coverage < 1
    assert any("rng_state" in line for line in attempt.engine["left_to_torch"])


def test_the_trial_run_draws_no_random_numbers() -> None:
    """The first call, too, is eager's."""
    x = torch.ones(64, requires_grad=True)

    def drop(x):
        return F.dropout(torch.exp(x) * 2, 0.5)

    torch.manual_seed(7)
    expected = drop(x)
    torch.manual_seed(7)
    torch.testing.assert_close(compiled(drop, "onnxrt")(x), expected)
    assert last().chosen == "onnxrt"


def test_batch_norms_statistics_move_as_in_eager() -> None:
    """Mean, variance and the count of batches, with the gradient through the norm."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    assert_trains_alike(model.train(), {"input": torch.randn(4, 3, 8, 8)})


def test_what_a_batch_norm_keeps_is_no_view_by_primitives() -> None:
    """Torch makes what is returned and a view; by its primitives that takes 60 times as long."""
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.SiLU())
    x = torch.randn(1, 8, 6, 6)
    f = compiled(model.train(), "onnxrt")
    f(x).sum().backward()
    with torch.profiler.profile(acc_events=True) as profile:  # torch 2.12 warns without
        f(x).sum().backward()
    assert last().chosen == "onnxrt"
    assert not [each.key for each in profile.key_averages() if each.key.startswith("prims")]


@pytest.mark.parametrize("dims", [(0, 2), (0, -2), (1, 3), (0, 1, 2, 3), ()], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_squeeze_of_several_dimensions_is_eagers(dims, dynamic: bool) -> None:
    """Whichever of them are one."""

    def squeeze(x):
        return (x * 2).squeeze(dims)

    x = torch.randn(1, 3, 1, 4, requires_grad=True)
    result = compiled(squeeze, "onnxrt", dynamic=dynamic)(x)
    torch.testing.assert_close(result, squeeze(x))
    assert result.stride() == squeeze(x).stride()
    assert last().chosen == "onnxrt", last().attempts[0].message


@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", ["LayerNorm", "GroupNorm"])
def test_norms_train_under_autocast(norm: str, dtype, has_bf16: bool, monkeypatch) -> None:
    """Their statistics are float32, whatever torch's fake kernels say of halves beside float32."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: has_bf16)
    made = torch.nn.LayerNorm(8) if norm == "LayerNorm" else torch.nn.GroupNorm(2, 8)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), made, torch.nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    x = torch.randn(6, 4)
    for each in (model, compiled(twin, "onnxrt", min_coverage=0.0)):
        with torch.autocast("cpu", dtype):
            each(x).float().square().sum().backward()

    assert last().chosen == "onnxrt", last().attempts[0].message
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (parameter.grad - other.grad).norm() <= 0.02 * parameter.grad.norm() + 0.02


def test_a_backward_that_computes_nothing_is_torchs() -> None:
    """The forward is taken, the gradient is handed on."""
    x = torch.ones(3, requires_grad=True)
    compiled(lambda x: x + 1, "onnxrt")(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.coverage) == ("succeeded", 1.0)


def test_min_coverage_is_of_forward_and_backward_together() -> None:
    """What cannot be taken in one of them may be made up for by the other."""

    def run(x):
        return torch.i0(torch.tanh(x * 2) + x).sum()

    x = torch.randn(3, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    compiled(run, "onnxrt", min_coverage=0.5)(x).backward()
    run(twin).backward()
    torch.testing.assert_close(x.grad, twin.grad)
    assert last().chosen == "onnxrt"
    assert 0.5 <= last().attempts[0].coverage < 1


def test_nothing_of_the_first_batch_is_kept() -> None:
    """Nor the weights, once the model is gone: an input written to refers to the compiled graph."""

    def step(model, x):
        y = model(x)
        x.mul_(0.5)
        return x, y.detach()

    linear = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True) * 1
    f = compiled(step, "onnxrt")
    f(linear, x)[0].sum().backward()
    assert last().chosen == "onnxrt"
    batch, weight = weakref.ref(x), weakref.ref(linear.weight)
    del x
    gc.collect()
    assert batch() is None
    del f, linear
    torch.compiler.reset()
    gc.collect()
    assert weight() is None


def test_a_backward_may_run_twice() -> None:
    """``retain_graph`` keeps what the forward saved."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x = torch.randn(3, 4)
    loss = compiled(model, "onnxrt")(x).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for p, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad)


def test_any_batch_size_trains() -> None:
    """Sizes that are symbols are saved for the backward as integers."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    run = compiled(model, "onnxrt", dynamic=True)
    for size in (3, 5, 9):
        x = torch.randn(size, 4)
        model.zero_grad()
        (run(x).flatten(1) * torch.arange(size)[:, None]).sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (model(x) * torch.arange(size)[:, None]).sum().backward()
        for p, grad in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(grad, p.grad)
    assert len(composer.reports()) == 1
    assert last().chosen == "onnxrt"


class Counting(torch.nn.Module):
    """Adds to a buffer, and multiplies by what is in it then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.total: torch.Tensor
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return self.linear(x) * self.total


@pytest.mark.parametrize("engine", ["aot_eager", "onnxrt", *thorough("inductor")])
def test_a_buffer_that_is_written_to_and_read_has_the_gradients_of_eager(engine: str) -> None:
    """Torch's partitioner would have the backward add to it once more (torch 2.13)."""
    model = Counting()
    twin = copy.deepcopy(model)
    run = compiled(model, engine)
    for _ in range(2):
        x = torch.randn(3, 8)
        for function in (run, twin):
            function(x).sum().backward()
    assert last().chosen == engine
    torch.testing.assert_close(model.linear.weight.grad, twin.linear.weight.grad)
    torch.testing.assert_close(model.total, twin.total)


class Memory(torch.nn.Module):
    """Carries a state on that its weight is part of, as a recurrent one or a bank of keys does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 9.0))
        self.state: torch.Tensor
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.mul_(0.5).add_(self.weight * x)
        return (self.state * x).sum()


TRIALS = {
    "verified": {"verify": "compile"},
    "sampled": {"verify": {"when": "sample", "every": 1}},
    "chosen": {"select": {"by": "fastest", "seconds": 0.1}},
}


@pytest.mark.parametrize(
    "truncated",
    [True, pytest.param(False, marks=needs_torch("2.12", "the second call has other gradients"))],
)
@pytest.mark.parametrize("options", TRIALS.values(), ids=TRIALS)
def test_no_gradient_goes_through_a_trial(options: dict, truncated: bool) -> None:
    """The values of a buffer can be put back, but autograd would keep what a trial wrote to it."""
    found = []
    for is_compiled in (False, True):
        model = Memory()
        run = compiled(model, "onnxrt", **options) if is_compiled else model
        losses = []
        for step in range(3):
            losses.append(run(torch.linspace(-1, 1, 8) + step))
            if truncated:
                losses.pop().backward()
                model.state = model.state.detach()
        if losses:
            sum(losses).backward()
        found.append((model.weight.grad, model.state))
    torch.testing.assert_close(*found)
    assert {report.chosen for report in composer.reports()} <= {"onnxrt", "eager"}
