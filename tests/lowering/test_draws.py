"""Random numbers under the ONNX engines: drawn by torch as eager draws them; none cuts a graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, last
from torch import nn
from torch.utils.checkpoint import checkpoint

from composer import _torch
from composer.lowering.loaded import BoundRegion

pytestmark = pytest.mark.slow


def path_dropped(x):
    """As in timm: a whole example at a time."""
    kept = x.new_empty((x.shape[0], *[1] * (x.ndim - 1))).bernoulli_(0.8)
    return x * kept / 0.8


def attended(x):
    x = x.flatten(2)
    return F.scaled_dot_product_attention(x, x.sin(), x.cos(), dropout_p=0.3)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of nearly all": lambda x: F.dropout(x, 0.999),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout of channels": lambda x: F.dropout2d(x, 0.5),
    "dropout of a transposed one": lambda x: F.dropout(x.transpose(1, 3), 0.5),
    "dropout of a part": lambda x: F.dropout(x[:, 1:], 0.5),
    "dropout of a repeated one": lambda x: F.dropout(x.mean(1, True).expand_as(x), 0.5),
    "dropout of a repeated, transposed one": lambda x: F.dropout(
        x.transpose(2, 3).mean(1, True).expand(-1, 3, -1, -1), 0.5
    ),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "dropped path": path_dropped,
    "attention": attended,
    "uniform": lambda x: x * torch.rand_like(x),
    "uniform in double": lambda x: x * torch.rand_like(x, dtype=torch.float64),
    "normal": lambda x: x + torch.randn_like(x),
    "normal, as a part": lambda x: x[..., :2] + x[..., 2:4] * torch.randn_like(x[..., 2:4]),
    "normal, transposed": lambda x: x.mT + torch.randn_like(x.mT),
    "integers": lambda x: x * torch.randint_like(x, 7),
    "integers between": lambda x: x * torch.randint_like(x, 3, 9, dtype=torch.int64),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(2.0),
    "a sample of Gumbel's": lambda x: F.gumbel_softmax(x, tau=0.7),
    "uniform between": lambda x: x * x.new_empty(x.shape).uniform_(-1, 2),
    "normal about one": lambda x: x * torch.empty_like(x).normal_(1, 2),
    "lognormal": lambda x: x * torch.empty_like(x).log_normal_(0.5, 0.3),
    "Cauchy's": lambda x: x + torch.empty_like(x).cauchy_(1, 0.1),
    "geometric": lambda x: x * torch.empty_like(x).geometric_(0.4),
    "leaking at random": lambda x: F.rrelu(x, training=True),
}

CUTTING = {("leaking at random", kind) for kind in ("static", "dynamic", "channels last")}
CUTTING |= {("integers between", "channels last")}
"""How many are drawn depends on what is computed; the operator to draw them with is ``from``."""

OTHERWISE = {"dropout of all", "alpha dropout"}
"""AOTAutograd itself draws where eager does not, and in another order of memory (torch 2.13)."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[BoundRegion]:
    """Which engines were called, in order."""
    called: list[BoundRegion] = []
    original = BoundRegion.__call__

    def call(engine: BoundRegion, *args: object) -> list[object]:
        called.append(engine)
        return original(engine, *args)

    monkeypatch.setattr(BoundRegion, "__call__", call)
    return called


def stepped(run, x) -> list[torch.Tensor]:
    """Result, gradient and what is drawn next."""
    torch.manual_seed(7)
    x = x.detach().requires_grad_()
    result = run(x)
    return [result, *torch.autograd.grad(result.square().sum(), x), torch.rand(2)]


@pytest.mark.parametrize("kind", ["static", "channels last", "dynamic"])
@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_is_eagers(name: str, kind: str, runs) -> None:
    """One forward, one backward, each whole but for the draws."""
    dynamic, usual = kind == "dynamic", kind != "channels last"
    order = torch.contiguous_format if usual else torch.channels_last
    layer = nn.Conv2d(3, 4, 1)

    def program(x):
        return torch.tanh(DRAWS[name](torch.tanh(layer(x)))) * 2

    step = compiled(program, "onnxrt", dynamic=dynamic, min_coverage=0.5)
    if name in OTHERWISE:
        program = torch.compile(program, backend="aot_eager")
    for size in (2, 3) if dynamic else (2,):
        x = torch.randn(size, 3, 4, 5).contiguous(memory_format=order)
        stepped(step, x)
        runs.clear()
        torch.testing.assert_close(stepped(step, x), stepped(program, x), rtol=1e-4, atol=1e-5)
    (attempt,) = last().attempts
    assert last().chosen == "onnxrt", attempt.message
    drawn = [each for each in attempt.engine["left_to_torch"] if "random numbers" in each]
    assert all("test_draws.py" in each for each in drawn)
    if (name, kind) not in CUTTING:
        assert len(runs) == 2, runs


def test_a_transformer_trains_as_one_region(runs) -> None:
    """Its attention hands a transposed tensor to a dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    program = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    step = compiled(program, "onnxrt")
    x = torch.randn(3, 5, 8)
    stepped(step, x)
    runs.clear()
    torch.testing.assert_close(stepped(step, x), stepped(program, x), rtol=1e-4, atol=1e-5)
    assert last().chosen == "onnxrt"
    assert len(runs) == 2


RECOMPUTED = (
    {"aggressive_recomputation": True},
    *({"activation_memory_budget": b} for b in (0, 0.1)),
)


@pytest.mark.parametrize("config", RECOMPUTED, ids=str)
@pytest.mark.parametrize(
    "name",
    ["dropout", "dropout of a transposed one", "attention", "normal", "leaking at random"],
)
def test_what_is_drawn_is_not_drawn_again_to_save_memory(name: str, config: dict) -> None:
    """The backward of a mask that it drew itself would be another function's."""

    def program(x):
        return torch.sigmoid(DRAWS[name](torch.sin(x)) * 3).sin().exp()

    x = torch.randn(2, 3, 4, 5)
    with torch._functorch.config.patch(config):
        found = stepped(compiled(program, "onnxrt", min_coverage=0.2), x)
    torch.testing.assert_close(found, stepped(program, x), rtol=1e-4, atol=1e-5)
    assert last().chosen == "onnxrt", last().attempts[0].message


TWICE = {
    "uniform": lambda x: torch.zeros(x.shape).uniform_(),
    "normal": lambda x: torch.zeros(x.shape).normal_(),
    "normal, transposed": lambda x: torch.randn_like(x.mT).mT,
    "integers, transposed": lambda x: torch.randint_like(x.mT, 9).mT,
    "exponential": lambda x: torch.zeros_like(x).exponential_(),
    "lognormal": lambda x: torch.zeros_like(x).log_normal_(),
    "Cauchy's": lambda x: torch.zeros_like(x).cauchy_(),
    "geometric": lambda x: torch.ones_like(x).geometric_(0.3),
}


@pytest.mark.parametrize("name", TWICE)
def test_two_draws_that_are_alike_are_two(name: str) -> None:
    """Each has numbers of its own, where torch's partitioner takes them for the same."""
    draw = TWICE[name]

    def program(x):
        return torch.tanh(x) * draw(x) + torch.sin(x) * draw(x)

    x = torch.randn(4, 8)
    found, expected = (stepped(run, x) for run in (compiled(program, "onnxrt"), program))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert last().chosen == "onnxrt"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dropout_in_other_dtypes_is_eagers(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor is a number of Python's in all of them."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: False)
    x = torch.randn(3, 5, dtype=dtype)

    def program(x):
        return F.dropout(x * 2, 0.3) + 1

    found, expected = (stepped(run, x) for run in (compiled(program, "onnxrt"), program))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-5)
    assert last().chosen == "onnxrt"


def test_dropouts_of_a_checkpoint_cut_nothing(runs) -> None:
    """The backward draws them once more, each with the state it had."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def block(x):
        return F.dropout(torch.tanh(second(F.dropout(torch.relu(first(x)), 0.3))), 0.6)

    def program(x):
        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)

    step = compiled(program, "onnxrt")
    x = torch.randn(4, 8)
    stepped(step, x)
    runs.clear()
    torch.testing.assert_close(stepped(step, x), stepped(program, x))
    assert last().chosen == "onnxrt"
    assert len(runs) == 2


@pytest.mark.parametrize("grad", [True, False])
def test_leaking_outside_of_training_draws_nothing(grad: bool) -> None:
    """The slope is the mean of its bounds."""

    def program(x):
        return F.rrelu(torch.tanh(x), 0.1, 0.5) * 2

    x = torch.randn(4, 5)
    with torch.set_grad_enabled(grad):
        run = compiled(program, "onnxrt", min_coverage=1.0)
        results = [stepped(each, x) if grad else each(x) for each in (run, program)]
    torch.testing.assert_close(*results)
    assert (last().chosen, last().attempts[0].coverage) == ("onnxrt", 1.0)


def test_allocating_is_no_computing() -> None:
    """Coverage counts a mask that is drawn, and not the memory that is drawn into."""
    compiled(lambda x: F.dropout(torch.tanh(x), 0.5), "onnxrt")(torch.randn(4))
    (attempt,) = last().attempts
    assert attempt.coverage == 3 / 4


def test_what_a_branch_draws_is_drawn_in_order() -> None:
    """Cutting out regions moves no later draw before it."""

    def f(x, at):
        h = torch.relu(x)
        dropped = torch.cond(at, lambda h: F.dropout(h, 0.5, True), lambda h: h * 2, (h,))
        noise = torch.rand_like(x)
        return dropped + noise + torch.special.bessel_j0(torch.sigmoid(x))

    x, at = torch.randn(64), torch.tensor(True)
    with torch.no_grad():
        g = compiled(f, {"backend": "onnxrt", "min_coverage": 0})
        torch.manual_seed(0)
        expected = f(x, at)
        torch.manual_seed(0)
        torch.testing.assert_close(g(x, at), expected)
    assert last().chosen == "onnxrt"
