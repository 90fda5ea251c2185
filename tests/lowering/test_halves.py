"""Half precision on ONNX Runtime's CPU provider: in float32, rounded where eager rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, last

from composer import _torch
from composer.backends import onnxrt
from composer.backends.onnxrt import capacity, kernels

pytestmark = pytest.mark.slow

BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _processor_without_bf16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: False)
    with torch.no_grad():
        yield


def run(function: Callable, *args: object, **options: object) -> object:
    """The result of the second call, when the engine has all of the graph."""
    taken = compiled(function, "onnxrt", min_coverage=1.0, **options)
    taken(*args)
    result = taken(*args)
    assert last().chosen == "onnxrt", last().attempts[0].message
    return result


def numbers(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0)).to(dtype)


def first(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0, 0, 1]), numbers(3, dtype=dtype)


TAKEN = {
    "bfloat16 product": (lambda x: x @ x, numbers(3, 3)),
    "bfloat16 sum": (lambda x: x + x, numbers(3)),
    "float16 added up": (lambda i, x: x.scatter_add(0, i, x), *first(F16)),
    "float16 reduced": (lambda i, x: x.scatter_reduce(0, i, x, "amax"), *first(F16)),
    "float16 put in": (lambda i, x: x.index_put((i,), x, accumulate=True), *first(F16)),
}


@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN)
def test_what_has_no_kernel_is_computed_in_float32(case: tuple) -> None:
    """With eager's dtype, and its numbers."""
    function, *args = case
    torch.testing.assert_close(run(function, *args), function(*args))


@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN)
def test_kernels_are_still_missing(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as it is, ONNX Runtime refuses the call."""
    monkeypatch.setattr(onnxrt, "narrow_here", lambda node, device: ())
    function, *args = case
    compiled(function, "onnxrt")(*args)
    assert last().chosen == "eager", "the rule can go"


def test_exponents_beyond_float64_have_their_logarithm() -> None:
    """Masks of -65504, too; ONNX's definition of it knows no largest to take off first."""
    x = torch.tensor([[720.0, 9.0, 3.0], [-1e4, -1e4, -1e4], [-65504.0, 32752.0, 0.0]], dtype=F16)
    for dim in (0, 1):
        torch.testing.assert_close(run(lambda x, d=dim: x.logsumexp(d), x), x.logsumexp(dim))


def test_numbers_are_compared_as_float16_holds_them() -> None:
    """A tenth is equal to itself, and what is beyond the range to infinity."""
    x = torch.tensor([0.1, -0.3, 0.0, float("inf"), 1.0], dtype=F16)

    def compared(x: torch.Tensor) -> list[torch.Tensor]:
        signs = torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge
        return [f(x, number) for f in signs for number in (0.1, -0.3, 1e-30, 1e30, 1, 70000)]

    torch.testing.assert_close(run(compared, x), compared(x))


EXACT = {
    "a chain of operators": lambda x: ((x * 3 + 0.1) / 7 - x).sin() * 1.001,
    "a dtype that is asked for": lambda x: (
        x.sum(0, dtype=BF16) + torch.full_like(x, 0.3, dtype=BF16)
    ),
    "a cast of the user's": lambda x: x.float().mul(1.001).to(BF16) + x,
    "an overflow": lambda x: x * 3e38 * 2,
    "the largest": lambda x: x.max(0),
    "an order": lambda x: x.sort(0),
    "integers": lambda x: (x * 10).to(torch.int64) + x,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", EXACT.values(), ids=EXACT)
def test_every_call_is_rounded_as_in_eager(function: Callable, dynamic: bool) -> None:
    """To the bit, where nothing is added up."""
    x = torch.tensor([0.1, -1.0, 0.1001, 3.0, 0.0, -0.25, 1e-3, 77.0]).to(BF16)
    expected = function(x)
    torch.testing.assert_close(run(function, x, dynamic=dynamic), expected, rtol=0, atol=0)


def close(x: torch.Tensor) -> torch.Tensor:
    """Where a number that is rounded, and one that is not, have the most different results."""
    return torch.stack([x == 0.1, x != 0.1, x < 1001, x <= 1001, x > 1001, x >= 1001, x == 257])


NUMBERS = {
    "compared": close,
    "hardshrink": lambda x: F.hardshrink(x, 0.1),
    "added": lambda x: (x + 257) + 0.1,
    "subtracted": lambda x: (x - 257) - 1.3,
    "subtracted from": lambda x: 257 - x,
    "a factor of what is added": lambda x: torch.add(torch.zeros_like(x), x, alpha=1.3),
    "a factor of a wider tensor": lambda x: torch.add(
        torch.zeros_like(x), x.float() / 3, alpha=1.3
    ),
    "fmod": lambda x: torch.fmod(x, 1.3),
    "remainder": lambda x: torch.remainder(x, 1.3),
    "a power": lambda x: x.abs() ** 1.3,
    "to a power": lambda x: 1.3**x,
    "multiplied": lambda x: x * 1.3,
    "divided by": lambda x: x / 257,
    "divided and rounded": lambda x: torch.div(x, 1.3, rounding_mode="trunc"),
    "divided and rounded by others": lambda x: torch.div(
        x, (x.flip(0) * 0.7).clamp_min(0.01), rounding_mode="trunc"
    ),
    "divided and rounded by one": lambda x: (
        torch.div(x, x[5], rounding_mode="trunc"),
        torch.div(x, x[5:6], rounding_mode="trunc"),
        torch.div(x[5], x, rounding_mode="trunc"),
    ),
    "divided and floored": lambda x: torch.div(x, 1.3, rounding_mode="floor"),
    "clamped": lambda x: x.clamp(-1.3, 257),
    "threshold": lambda x: F.threshold(x, 0.1, 5.0),
    "sloped": lambda x: F.leaky_relu(x, 0.1),
    "filled": lambda x: x.masked_fill(x > 0, 0.1),
}


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_numbers_are_rounded_where_eager_rounds_them(function: Callable) -> None:
    """Some operators take them in the dtype of the tensor, others in float32."""
    x = torch.cat([numbers(500) * scale for scale in (0.1, 1, 10, 300)])
    x[:6] = torch.tensor([0.1, 0.1001, 256.0, 1000.0, 1008.0, 1.3])
    torch.testing.assert_close(run(function, x), function(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_small_probabilities_have_their_logarithms(dtype: torch.dtype) -> None:
    """Eager's are as far off where half precision has no exact rest, so float64's are compared."""
    x = torch.tensor([-16.0, -12.0, -9.0]).to(dtype)
    found = run(lambda x: torch.sigmoid(x).log(), x)
    torch.testing.assert_close(found.double(), F.logsigmoid(x.double()), rtol=1e-2, atol=0)


def block() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return layer.to(BF16)


def test_a_block_of_a_transformer_is_taken_whole() -> None:
    """Norms, which give several results, and attention; the report says how it is computed."""
    model, x = block(), numbers(2, 5, 16)
    torch.testing.assert_close(run(model, x), model(x), rtol=2e-2, atol=2e-2)
    assert last().attempts[0].engine["bfloat16"] == "computed in float32"
    assert last().attempts[0].coverage == 1.0


def test_a_changed_weight_is_seen() -> None:
    """The copy in float32 is made anew."""
    model, x = torch.nn.Linear(4, 4).to(BF16).eval(), numbers(3, 4)
    taken = compiled(model, "onnxrt")
    taken(x)
    model.weight.mul_(2)
    torch.testing.assert_close(taken(x), model(x), rtol=2e-2, atol=2e-2)


def test_gradients_are_computed_so_too() -> None:
    """They arrive in bfloat16."""
    x = numbers(2, 5, 16)
    gradients = []
    for backend in (None, "onnxrt"):
        model = block()
        with torch.enable_grad():
            (compiled(model, backend) if backend else model)(x).float().pow(2).mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert last().chosen == "onnxrt"
    torch.testing.assert_close(gradients[1], gradients[0], rtol=5e-2, atol=5e-2)


def test_a_processor_with_bfloat16_arithmetic_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has kernels for it, which are the faster ones there."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: True)
    function, x = TAKEN["bfloat16 product"]
    compiled(function, "onnxrt")(x)
    attempt = last().attempts[0]
    assert (last().chosen, attempt.reason) == ("eager", "unsupported_op")
    assert "ONNX Runtime has no kernel for bfloat16" in attempt.message


def test_weights_whose_copies_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a process that is killed; weights of float32 are not copied so."""
    monkeypatch.setattr(capacity, "available_memory", lambda: 2**10)
    x = numbers(3, 64)
    compiled(torch.nn.Linear(64, 64).to(BF16), "onnxrt")(x)
    attempt = last().attempts[0]
    assert (attempt.status, attempt.reason) == ("failed", "out_of_memory")
    assert "copies of the weights in float32 would take 0.0 GiB" in attempt.message
    compiled(torch.nn.Linear(64, 64), "onnxrt")(x.float())
    assert last().chosen == "onnxrt"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [4, 2])
def test_rows_that_are_masked_everywhere_give_zeros(dtype: torch.dtype, heads: int) -> None:
    """The padding on the left of a batch; heads of the query may share those of key and value."""
    query, key = torch.randn(2, 4, 6, 8, dtype=dtype), torch.randn(2, heads, 6, 8, dtype=dtype)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[1, :, :, :3] = False

    def attend(query, key, mask):
        return F.scaled_dot_product_attention(query, key, key, mask, enable_gqa=True) * 2

    found, expected = compiled(attend, "onnxrt")(query, key, mask), attend(query, key, mask)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert not found[1, :, :3].any()


def test_moves_need_no_cast() -> None:
    """A row of a table is looked up in bfloat16."""
    seen = []
    table = numbers(5, 4)
    graph = torch.fx.symbolic_trace(lambda i: torch.ops.aten.embedding.default(table, i))
    for node in graph.graph.nodes:
        node.meta["val"] = table
        seen.append(kernels.narrow_here(node, torch.device("cpu")))
    assert not any(seen)
