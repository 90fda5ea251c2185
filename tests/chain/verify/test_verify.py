"""``verify="compile"``: a candidate that computes something else than eager does not serve."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import compiled, last, thorough, upstream
from rewrites import CosineToSine, Scale, at, aten, cosines
from torch._dynamo import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from composer.build import current_build
from composer.chain.verify.against_eager import is_padded
from composer.errors import FallbackWarning, PassError
from composer.graphs.comparison import Bounds, LowPrecisionBounds, Mismatch, errors_of, mismatch_of
from composer.testing import FakeBackend, expect

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")


class Net(torch.nn.Module):
    """A linear layer, a batch norm whose statistics move in training, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.up(x))


WRONG = {
    "nan": "non_finite",
    "wrong_value": "numeric_mismatch",
    "wrong_shape": "output_mismatch",
    "wrong_dtype": "output_mismatch",
    "wrong_stride": "output_mismatch",
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fault", WRONG)
def test_wrong_answer_is_rejected_with_its_reason(fault: str, training: bool) -> None:
    """Whoever comes next serves, and the user sees eager's numbers."""
    net = Net().train(training)
    twin = copy.deepcopy(net)
    x = torch.randn(4, 6)
    with torch.set_grad_enabled(training), expect(rejected=1, reasons={WRONG[fault]: 1}):
        answer = compiled(net, FakeBackend(fault), FakeBackend(), verify="compile")(x)
        torch.testing.assert_close(answer, twin(x))
    assert last().chosen == "fake_honest"


def test_without_verify_the_wrong_answer_would_be_given() -> None:
    """It is off by default: a comparison costs two runs of eager."""
    x = torch.randn(3)
    assert not torch.equal(compiled(torch.sin, FakeBackend("wrong_value"))(x), x.sin())


@pytest.mark.parametrize(
    ("strides", "accepted"),
    [
        ((20, 5, 1), True),
        ((12, 3, 1), True),
        ((24, 6, 2), False),
        ((1, 4, 16), False),
        ((5, 5, 1), False),
        ((0, 3, 1), False),
    ],
)
def test_gaps_between_rows_are_padding(strides: tuple[int, ...], accepted: bool) -> None:
    """Another order is not, nor are columns apart, nor rows that overlap."""
    assert is_padded((2, 4, 3), strides, (12, 3, 1)) == accepted


def test_padding_on_the_cpu_is_a_mismatch() -> None:
    """No engine was seen to leave it there, and a program's view of the output may raise."""

    def laid_out(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            (value,) = gm.forward(*args)
            return (torch.zeros(64).as_strided((4, 3), (5, 1)).copy_(value),)

        return run

    compiled(torch.sin, laid_out, verify="compile")(torch.ones(4, 3))
    assert last().attempts[0].reason == "output_mismatch"


def test_engine_that_writes_to_its_inputs_is_rejected() -> None:
    """It ran on copies: the user's own tensor is as it was."""
    x = torch.randn(4)
    kept = x.clone()
    compiled(torch.sin, FakeBackend("mutates_inputs", at=1), verify="compile")(x)
    assert last().attempts[0].reason == "mutated_inputs"
    assert "input 0 afterwards" in last().attempts[0].message
    assert torch.equal(x, kept)


@pytest.mark.parametrize("factor", [1, 3])
def test_engine_that_writes_to_a_weight_is_rejected(factor: int) -> None:
    """With its numbers off as well: a reference made of the new weight would seem to agree."""

    def writes(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        (weight,) = (each for each in inputs if each.shape == (3, 3))

        def run(*args: Any) -> Any:
            outputs = [factor * each for each in gm.forward(*args)]
            with torch.no_grad():
                weight.add_(1)
            return outputs

        return run

    net, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    answer = compiled(net, writes, "aot_eager", verify="compile")(x)
    wrote, honest = last().attempts
    assert wrote.reason == "mutated_inputs"
    assert "another thread of the program, wrote to the model's weights" in wrote.message
    assert honest.accepted
    torch.testing.assert_close(answer, net(x))


@pytest.mark.parametrize("fault", ["raises", "mutates_inputs_and_raises"])
def test_engine_that_raises_at_its_first_call_is_found_out(fault: str) -> None:
    """Before it serves."""
    x = torch.randn(4)
    f = compiled(torch.sin, FakeBackend(fault, at=1), verify="compile")
    assert torch.equal(f(x), x.sin())
    assert (last().attempts[0].status, last().attempts[0].reason) == ("failed", "raised_at_runtime")
    assert last().runtime.fallbacks == 0


def bare(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend that forgets the tuple: Dynamo would take a row for the first output."""
    return lambda *args: gm.forward(*args)[0]


@pytest.mark.parametrize(
    "options", [{}, {"verify": "compile"}, {"verify": "sample"}, {"select": "fastest"}], ids=str
)
def test_engine_that_returns_no_tuple_is_found_out(options: Any) -> None:
    """Before it serves where it is run before that, else at the first call."""
    x = torch.randn(3, 2)
    f = compiled(torch.sin, bare, FakeBackend(name="second"), **options)
    assert torch.equal(f(x), x.sin())
    wrong = last().attempts[0]
    assert "the engine returned a Tensor, and no tuple" in wrong.message
    assert (wrong.status, wrong.reason) == ("rejected", "output_mismatch")


class Normed(torch.nn.Module):
    """Nothing but rounding is left of the gradient of the convolution's bias."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.conv, self.norm, self.then = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), then

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.then(torch.relu(self.norm(self.conv(x))).mean((2, 3)), *more)


MADE = {
    "eye": lambda h: h @ torch.eye(8),
    "tensor": lambda h: torch.addmm(torch.zeros(8), h, torch.tensor([[0.5] * 8] * 8)),
    "integers divided": lambda h: h @ (torch.arange(64).view(8, 8) / 7),
    "scattered": lambda h: torch.zeros(4, 8).scatter_add(1, torch.arange(8).expand(4, 8), h),
}


@pytest.mark.parametrize("made", MADE)
def test_what_the_graph_makes_in_the_default_dtype_is_widened(made: str) -> None:
    """Else there would be no run in float64 to judge what cancels by."""
    torch.manual_seed(0)
    compiled(Normed(MADE[made]), "onnxrt", verify="compile")(torch.randn(4, 3, 8, 8))
    assert last().attempts[0].accepted, last().attempts[0].message
    assert last().attempts[0].engine["verified"]["against"] == "float64"


def carried(h: torch.Tensor, state: torch.Tensor) -> Any:
    state.mul_(0.9)
    state.add_(h.mean(0))
    return h * 2, state * 1


@pytest.mark.parametrize("leaf", [True, False])
def test_a_state_that_is_written_to_is_run_in_float64(leaf: bool) -> None:
    """One that autograd has a history of is no leaf in float64 either: no leaf is written to."""
    torch.manual_seed(0)
    state = torch.zeros(8) if leaf else torch.zeros(8, requires_grad=True) * 1
    compiled(Normed(carried), "onnxrt", verify="compile")(torch.randn(4, 3, 8, 8), state)
    assert last().attempts[0].accepted, last().attempts[0].message
    assert last().attempts[0].engine["verified"]["against"] == "float64"


def off(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend whose numbers are off by two fifths."""
    honest = torch._dynamo.lookup_backend("aot_eager")(gm, inputs)
    return lambda *args: [each * 1.4 for each in honest(*args)]


def real_part(z: torch.Tensor) -> torch.Tensor:
    w = z * 2
    torch.view_as_real(w).mul_(3)
    return w


def test_no_run_in_float64_is_made_that_computes_something_else() -> None:
    """It would excuse an engine for what eager seems to be off by."""
    compiled(real_part, off, verify="compile")(torch.randn(8, dtype=torch.complex64))
    assert last().attempts[0].reason == "numeric_mismatch"


def test_what_is_drawn_in_the_dtype_of_a_made_tensor_is_eagers_in_float64() -> None:
    """Other draws would be no reference: an engine that sums more exactly would be off."""

    def f(x: torch.Tensor) -> torch.Tensor:
        kept = torch.bernoulli(torch.full((1000,), 0.3))
        return ((x + kept * 0.37) - x).sum().reshape(1)

    def exact(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(x: torch.Tensor) -> Any:
            wide = x.double()
            kept = torch.bernoulli(torch.full((1000,), 0.3))
            return [((wide + kept * 0.37) - wide).sum().float().reshape(1)]

        return run

    with torch.no_grad():
        compiled(f, exact, verify="compile")(torch.arange(30000.0, 31000.0))
    assert last().attempts[0].accepted, last().attempts[0].message


class ParameterStatistics(torch.nn.Module):
    """Statistics of a norm that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.var = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.mean, self.var, training=True) * 2


@torch._dynamo.allow_in_graph
def decayed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight.mul_(0.9)
    return x * 2


class Decays(torch.nn.Module):
    """Writes to a parameter where the graph does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return decayed(self.weight, x.sin())


@pytest.mark.parametrize("options", [{"verify": "compile"}, {"select": "fastest"}], ids=str)
@pytest.mark.parametrize("model", [ParameterStatistics, Decays])
def test_engine_that_writes_where_eager_does_is_not_blamed(model: Any, options: Any) -> None:
    """The statistics of a norm, and what a function of the program's writes to."""
    compiled(model(), "aot_eager", **options)(torch.randn(5, 3 if model is not Decays else 4))
    assert last().attempts[0].reason in (None, "slower"), last().attempts[0].message


def test_a_state_that_no_output_comes_from_may_have_zeros_for_a_gradient() -> None:
    """AOTAutograd's; eager has none."""
    weight = torch.nn.Parameter(torch.randn(3, 3))

    def f(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(2)
        return x @ weight

    state = torch.ones(3, requires_grad=True) * 1
    compiled(f, "aot_eager", verify="compile")(torch.randn(2, 3), state)
    assert last().attempts[0].accepted, last().attempts[0].message


def test_backward_that_fails_is_found_out() -> None:
    """In training gradients are compared as well."""
    net = torch.nn.Linear(3, 3)
    compiled(net, FakeBackend("fails_in_backward"), verify="compile")(torch.ones(2, 3))
    assert last().attempts[0].reason == "raised_at_runtime"
    assert "the backward was made to raise" in last().attempts[0].message


def test_wrong_gradient_is_rejected() -> None:
    """The forward is right, the gradient of a weight is twice what it should be."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * gradient

    def doubles(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        honest = FakeBackend()(gm, inputs)
        return lambda *args: [Doubled.apply(each) for each in honest(*args)]

    net = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    compiled(net, doubles, verify="compile")(x).sum().backward()
    assert last().attempts[0].reason == "numeric_mismatch"
    assert "gradient of input" in last().attempts[0].message
    assert torch.equal(net.bias.grad, torch.full((3,), 2.0))


def test_verified_engine_is_accepted_and_says_how_far_it_is_off() -> None:
    """In the attempt's ``engine``."""
    compiled(Net(), "aot_eager", verify="compile")(torch.randn(4, 6))
    (attempt,) = last().attempts
    assert attempt.accepted
    found = attempt.engine["verified"]
    assert found["against"] == "eager"
    assert found["max_absolute_error"] < 1e-5
    assert found["min_cosine"] > 0.9999
    assert found["values"] > 5


def test_verifying_leaves_everything_as_it_was() -> None:
    """Inputs, statistics, gradients, the random state: one call is one call."""
    net = torch.nn.Sequential(Net(), torch.nn.Dropout(0.5))
    twin = copy.deepcopy(net)
    x = torch.randn(4, 6, requires_grad=True)
    torch.manual_seed(3)
    expected = twin(x)
    torch.manual_seed(3)
    answer = compiled(net, "aot_eager", verify="compile")(x)
    torch.testing.assert_close(answer, expected)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, twin.get_buffer(name))
    assert x.grad is None
    assert all(each.grad is None for each in net.parameters())


@pytest.mark.parametrize("options", [{}, {"verify": {"when": "sample", "every": 2}}])
def test_hooks_of_the_weights_hear_of_the_users_gradients_only(options: dict[str, Any]) -> None:
    """The gradients that are compared are made of made-up ones."""
    net = Net()
    heard: list[torch.Tensor] = []
    handle = net.up.weight.register_hook(heard.append)
    f = compiled(net, FakeBackend(), **{"verify": "compile", **options})
    for call in range(1, 5):
        f(torch.randn(4, 6)).sum().backward()
        assert len(heard) == call
    handle.remove()
    f(torch.randn(4, 6)).sum().backward()
    assert len(heard) == 4
    assert last().chosen == "fake_honest"


@pytest.mark.parametrize("options", [{}, {"verify": {"when": "sample", "every": 2}}])
@pytest.mark.parametrize("engine", [FakeBackend(), "inductor"])
def test_checkpoint_does_not_count_what_a_comparison_saves(
    engine: Any, options: dict[str, Any]
) -> None:
    """It would miss it when it runs the forward again, without one."""
    net = Net().eval()
    f = compiled(net, engine, **{"verify": "compile", **options})
    for _ in range(3):
        x = torch.randn(4, 6, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        checkpoint(f, x, use_reentrant=False).square().sum().backward()
        net(twin).square().sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)
    assert last().runtime.fallbacks == 0


def test_honest_engine_that_draws_eagers_random_numbers_is_held_to_them() -> None:
    """A wrong value behind a dropout is found."""
    net = torch.nn.Dropout(0.5)
    compiled(net, FakeBackend("wrong_value"), FakeBackend(), verify="compile")(torch.ones(64))
    assert [a.reason for a in last().attempts] == ["numeric_mismatch", None]
    assert last().attempts[1].engine["verified"]["against"] == "eager"


def test_numbers_that_are_drawn_are_not_judged_by_a_draw_in_float64() -> None:
    """It gives other numbers from the same seed, so that any would be near enough."""

    def wrong(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda *args: [each * 1.5 for each in gm(*args)]

    f = compiled(lambda x: x + torch.randn_like(x), wrong, "aot_eager", verify="compile")
    f(torch.ones(64))
    assert [a.reason for a in last().attempts] == ["numeric_mismatch", None]


def test_gradient_without_elements_beside_numbers_that_are_drawn_is_no_obstacle() -> None:
    """The engine is judged all the same."""
    x, empty = torch.ones(3, requires_grad=True), torch.ones(0, 3, requires_grad=True)
    net = compiled(
        lambda x, e: (x * torch.randperm(3).float(), e * 2),
        FakeBackend("wrong_value"),
        FakeBackend(),
        verify="compile",
    )
    net(x, empty)
    assert [a.reason for a in last().attempts] == ["numeric_mismatch", None]


def test_small_gradient_of_numbers_that_are_drawn_is_not_judged_by_other_draws() -> None:
    """That it is small beside the others does not say that nothing but rounding is left of it."""

    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([1e-4]))
            self.weight = torch.nn.Parameter(torch.full((64,), 1e-6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.empty_like(x).normal_()
            return (x * 1e4 * self.weight).sum() + (noise * self.scale).sum() * 1e-6

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return -grad

    def wrong(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda *args: gm(*(Turned.apply(a) if a.numel() == 1 else a for a in args))

    compiled(Noisy(), wrong, "aot_eager", verify="compile")(torch.ones(64))
    assert [a.reason for a in last().attempts] == ["numeric_mismatch", None]


def test_size_among_outputs_that_are_drawn_is_no_obstacle() -> None:
    """It has no float64; what is wrong beside it is found."""

    def wrong(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda *args: [each * 2 if torch.is_tensor(each) else each for each in gm(*args)]

    gm = torch.fx.symbolic_trace(lambda x: (functional.dropout(x, 0.5), x.size(0)))
    options = {"chain": [wrong, FakeBackend()], "verify": "compile"}
    torch._dynamo.lookup_backend("composer")(gm, [torch.ones(64)], options=options)
    assert [a.reason for a in last().attempts] == ["numeric_mismatch", None]


LOWEST = [
    (torch.float32, torch.finfo(torch.float32).min),
    (torch.float32, -1e9),
    (torch.bfloat16, torch.finfo(torch.bfloat16).min),
    (torch.float16, torch.finfo(torch.float16).min),
]


@pytest.mark.parametrize(("dtype", "fill"), LOWEST)
@pytest.mark.parametrize("bounds", [Bounds(), LowPrecisionBounds()])
def test_what_a_mask_was_filled_with_hides_nothing(
    dtype: torch.dtype, fill: float, bounds: Bounds
) -> None:
    """The other numbers are held to their own size, however few they are."""
    expected = torch.tensor([1.0, 2.0, -3.0, fill, fill, fill, fill], dtype=dtype)
    close, wrong = expected.clone(), expected.clone()
    close[0] *= 1 - torch.finfo(dtype).eps
    wrong[1] += 0.5
    assert mismatch_of(close, expected, None, bounds) is None
    mismatch = mismatch_of(wrong, expected, None, bounds)
    assert mismatch is not None
    assert mismatch[0] is Mismatch.NUMBERS
    assert mismatch_of(torch.full((3,), 1e9), torch.full((3,), 1e9 + 64), None, bounds) is None


def test_engine_with_random_numbers_of_its_own_is_held_to_structure() -> None:
    """Inductor draws others than eager; nobody can say which are right."""

    def draws_its_own(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            torch.rand(5)
            return FakeBackend()(gm, inputs)(*args)

        return run

    compiled(torch.nn.Dropout(0.5), draws_its_own, verify="compile")(torch.ones(64))
    assert "structure only" in last().attempts[0].engine["verified"]["against"]


def test_low_precision_is_judged_by_float64() -> None:
    """An engine closer to the truth than eager is not blamed for eager's rounding."""

    def wide_sum(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda x: [(x.double() * x.double()).sum().to(x.dtype)]

    def f(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for each in (x * x).unbind():
            total = total + each
        return total

    x = torch.rand(600).to(torch.bfloat16)
    compiled(f, wide_sum, verify="compile")(x)
    (attempt,) = last().attempts
    assert attempt.accepted, attempt.message
    assert attempt.engine["verified"]["against"] == "float64"


def test_autocast_within_the_graph_is_off_in_float64() -> None:
    """Without torch's warning that it knows none of that dtype."""

    def off(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda *args: [each * 1.1 for each in gm(*args)]

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        compiled(f, off, verify="compile")(torch.rand(4, 4))
    assert last().attempts[0].reason == "numeric_mismatch"
    assert [each.category for each in said] == [FallbackWarning]


def trained(p: float) -> torch.nn.Module:
    layers = [torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(p)]
    layers += [torch.nn.Linear(64, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 64)]
    return torch.nn.Sequential(*layers, torch.nn.GELU(), torch.nn.Dropout(p))


@pytest.mark.parametrize("within", [True, False])
def test_dropout_under_autocast_is_judged_by_float64(within: bool) -> None:
    """The gradients are float32, and carry the rounding of bfloat16; eager's do as well."""
    torch.manual_seed(0)
    model, x = trained(0.1), torch.randn(16, 32)
    autocast = torch.autocast("cpu", torch.bfloat16)
    f = compiled(autocast(model.forward) if within else model, "aot_eager", verify="compile")
    with contextlib.nullcontext() if within else autocast:
        f(x).float().square().sum().backward()
    (attempt,) = last().attempts
    assert attempt.accepted, attempt.message
    assert "float64" in attempt.engine["verified"]["against"]


def test_checkpoint_with_dropout_is_judged_by_float64_of_the_same_numbers() -> None:
    """A bias of keys has a gradient that is nothing but rounding: only float64 tells."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (each(x)[:, None] for each in (self.q, self.k, self.v))
            attend = functional.scaled_dot_product_attention
            return attend(q, k, v, dropout_p=0.2)[:, 0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.attend, x, use_reentrant=False)

    torch.manual_seed(0)
    compiled(Attention(), "onnxrt", verify="compile")(torch.randn(4, 9, 16))
    (attempt,) = last().attempts
    assert attempt.accepted, attempt.message


def test_graph_that_cannot_be_run_in_float64_is_compared_with_eager(capsys: Any) -> None:
    """And nobody is shown the traceback of the attempt."""

    @torch.library.custom_op("test_verify::of_float32", mutates_args=())
    def of_float32(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        return x * 2

    of_float32.register_fake(torch.empty_like)
    with torch.no_grad():
        compiled(of_float32, FakeBackend("wrong_value"), verify="compile")(torch.ones(4))
    assert last().attempts[0].reason == "numeric_mismatch"
    assert last().attempts[0].engine["in_float64"] == "no: TypeError: float32 only"
    assert "Traceback" not in capsys.readouterr().err


def test_bits_read_as_another_dtype_are_not_judged_by_float64() -> None:
    """Those of a float64 are others, so eager would seem to be far off as well."""

    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int32).float().mean(-1)

    with torch.no_grad():
        compiled(bits, FakeBackend("wrong_value"), verify="compile")(torch.randn(8, 64))
    assert last().attempts[0].reason == "numeric_mismatch"
    assert "reads the bits" in last().attempts[0].engine["in_float64"]


def test_what_a_module_holds_of_an_earlier_graph_can_still_be_differentiated() -> None:
    """Such as a hidden state. The run that is compared has a backward of its own."""

    class Cell(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.state: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) * self.state

    gradients = []
    for how in ("eager", "aot_eager"):
        torch.manual_seed(0)
        model = Cell()
        model.state = torch.tanh(model.linear(torch.randn(2, 4)))
        compiled(model, how, verify="compile")(torch.randn(2, 4)).sum().backward()
        gradients.append(model.linear.weight.grad)
    assert last().chosen == "aot_eager"
    torch.testing.assert_close(*gradients)


def test_gradient_of_a_conjugated_input_is_compared() -> None:
    """It is copied by another way than plain tensors."""
    z = torch.randn(3, dtype=torch.complex64, requires_grad=True).conj()
    compiled(lambda z: torch.view_as_real(z * z).sum(-1), "aot_eager", verify="compile")(z)
    assert last().attempts[0].engine["verified"]["values"] == 3


def test_rounding_away_a_zero_is_no_fault() -> None:
    """A gradient that is exactly zero is rounding in eager and in any engine."""
    net = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return net(x, x, x, need_weights=True)[0]

    compiled(f, "onnxrt", verify="compile")(torch.randn(2, 5, 8))
    assert last().attempts[0].accepted, last().attempts[0].message


def test_tolerance_is_the_policys() -> None:
    """Loose enough, a wrong value passes; the default of float32 rejects it."""
    x = torch.randn(8)
    loose = {"when": "compile", "rtol": 0.5, "atol": 1.0}
    compiled(torch.sin, FakeBackend("wrong_value"), verify=loose)(x)
    assert last().attempts[0].accepted


def test_error_that_eager_raises_is_not_the_engines() -> None:
    """The graph cannot be verified; the user meets eager's own error at the call."""

    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i]

    run = compiled(f, "aot_eager", verify="compile")
    with pytest.raises(IndexError, match="out of bounds"):
        run(torch.ones(3), torch.tensor([7]))
    assert "eager itself raises IndexError" in last().attempts[0].engine["verified"]


@pytest.mark.parametrize("options", [{"verify": "compile"}, {"select": "fastest"}], ids=str)
def test_gradients_that_the_graph_itself_takes_are_compared_and_measured(
    options: dict[str, Any],
) -> None:
    """``torch.func`` takes none where hooks are set on what autograd saves."""
    net, x = torch.nn.Linear(6, 1), torch.randn(4, 6)
    given = dict(net.named_parameters())

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, weights, (row,)).tanh().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    got = compiled(each, "aot_eager", **options)(given, x)
    torch.testing.assert_close(got, each(given, x))
    engine = last().attempts[0].engine
    assert isinstance(engine["verified" if "verify" in options else "timing"], dict), engine


def test_error_of_the_program_within_a_transform_leaves_none_of_its_levels() -> None:
    """Dynamo takes a level of ``torch.func`` that is left over for a fault of its own."""

    def f(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: row.gather(0, places))(table)

    run = compiled(f, "aot_eager", verify="compile")
    with pytest.raises(RuntimeError, match="out of bounds"):
        run(torch.ones(2, 3), torch.tensor([7, 8]))
    assert "eager itself raises RuntimeError" in last().attempts[0].engine["verified"]
    assert torch.equal(run(torch.ones(2, 3), torch.tensor([1, 2])), torch.ones(2, 2))


def test_dynamic_shapes_and_shared_inputs_are_verified() -> None:
    """Symbols have the first call's values; inputs may share memory."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * 2, y.reshape(-1) * x.shape[0]

    run = compiled(f, "aot_eager", verify="compile", dynamic=True)
    base = torch.randn(4, 6)
    mine, other = base.clone(), base.clone()
    got, expected = run(mine[:3], mine[1:]), f(other[:3], other[1:])
    assert last().attempts[0].engine["verified"]["against"] == "eager"
    for a, b in zip((*got, mine), (*expected, other), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("engine", [FakeBackend(), "inductor"])
@pytest.mark.parametrize("part", ["chunks", "every other", "expanded"])
def test_parts_of_a_tensor_in_the_autograd_graph_are_verified(engine: Any, part: str) -> None:
    """Their copies have their strides, which an engine has compiled for, and share their memory."""

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if part == "chunks":
            return (x * 2).chunk(2, -1)
        wide = x * 2
        return (
            (wide[:, ::2], wide[:, 1::2])
            if part == "every other"
            else (wide[:, :1].expand(4, 8), x)
        )

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a + b).sin() * a

    x = torch.randn(4, 8, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    compiled(joined, engine, verify="compile")(*parts(x)).sum().backward()
    joined(*parts(twin)).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    (attempt,) = last().attempts
    assert attempt.engine["verified"]["values"] >= 3


def test_part_of_a_tensor_in_the_autograd_graph_may_be_written_to_while_verified() -> None:
    """It is no leaf, and no view of one."""

    def doubled(a: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return a.sin()

    x = torch.randn(4, 8, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    compiled(doubled, FakeBackend(), verify="compile")((x * 2)[:, ::2]).sum().backward()
    doubled((twin * 2)[:, ::2]).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    assert isinstance(last().attempts[0].engine["verified"], dict)


class _Marked(torch.Tensor):
    """A subclass as users write them; AOTAutograd has its own way with it."""


@pytest.mark.parametrize("options", [{}, {"verify": {"when": "sample", "every": 2}}])
def test_subclass_of_tensor_that_is_written_to_is_written_to_once(options: dict[str, Any]) -> None:
    """It is not copied, so nothing is compared, and the record says so."""

    def one_more(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    f = compiled(one_more, "inductor", **{"verify": "compile", **options})
    with torch.no_grad():
        for _ in range(3):
            x = torch.zeros(3).as_subclass(_Marked)
            assert f(x).tolist() == [2.0] * 3
            assert x.tolist() == [1.0] * 3
    assert last().attempts[0].engine["verified"].startswith("no: inputs cannot be copied: ")


def test_successor_is_verified_on_the_sizes_of_its_own_first_call() -> None:
    """Not on those of the call that the graph was captured with."""

    def folded(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2).sin().reshape(x.shape[0], -1)

    wrong = FakeBackend("wrong_value")
    f = compiled(folded, FakeBackend("raises", at=2), wrong, verify="compile", dynamic=True)
    with expect(graphs=1, reasons={"raised_at_runtime": 1, "numeric_mismatch": 1}):
        for size in (6, 8, 10):
            x = torch.randn(size, 4)
            torch.testing.assert_close(f(x), folded(x))
    assert last().chosen == "eager"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_verified(mode: Any) -> None:
    """With inference tensors too."""
    with mode():
        x = torch.randn(3)
        f = compiled(torch.sin, FakeBackend("wrong_value"), "aot_eager", verify="compile")
        assert torch.equal(f(x), x.sin())
    assert [a.reason for a in last().attempts] == ["numeric_mismatch", None]


def test_passes_are_part_of_what_is_compared() -> None:
    """Eager, too, runs the graph that they left."""
    for stage in ("torch", "aten", "joint", "post_grad"):
        torch.compiler.reset()
        x = torch.randn(3)
        compiled(torch.cos, "aot_eager", verify="compile", passes=[at(stage, Scale)])(x)
        assert last().attempts[0].accepted, (stage, last().attempts[0].message)
        assert "verified" in last().attempts[0].engine


def off_by_one(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    return lambda *args: [each + 1 for each in gm.forward(*args)]


class SineOfFloat32(CosineToSine):
    """Leaves a graph in float64 alone."""

    stage = "post_grad"

    def run(self, gm: torch.fx.GraphModule) -> int:
        found = [node for node in cosines(gm) if node.meta["val"].dtype is torch.float32]
        return super().run(gm) if found else 0


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "changes",
    [at("joint"), at("post_grad"), SineOfFloat32()],
    ids=["joint", "post_grad", "float32"],
)
def test_what_a_later_pass_changes_hides_no_wrong_engine(changes: Any, training: bool) -> None:
    """Float64 is made of the graph that the passes left, as eager and the engines are."""
    x = torch.linspace(-1, 1, 6, requires_grad=training)
    compiled(torch.cos, off_by_one, "aot_eager", verify="compile", passes=[changes])(x)
    wrong, right = last().attempts
    assert wrong.reason == "numeric_mismatch"
    assert right.accepted, right.message


def test_weights_that_the_graph_holds_are_widened_after_a_later_pass() -> None:
    """A graph that Dynamo did not capture has them as attributes."""

    class Holds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cos(x @ self.weight)

    gm = torch.fx.symbolic_trace(Holds())
    options = {"chain": [off_by_one], "verify": "compile", "passes": [at("post_grad")]}
    with torch.no_grad():
        lookup_backend("composer")(gm, [torch.ones(2, 4)], options=options)
    (wrong,) = last().attempts
    assert (wrong.reason, wrong.engine) == ("numeric_mismatch", {})


def test_low_precision_after_a_later_pass_is_judged_by_float64() -> None:
    """Eager's sum in bfloat16 is far off; the engine's is not."""

    def wide_sum(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda x: [x.double().sin().sum().to(x.dtype)]

    def f(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for each in x.cos().unbind():
            total = total + each
        return total

    x = torch.rand(600).to(torch.bfloat16)
    compiled(f, wide_sum, verify="compile", passes=[at("post_grad")])(x)
    (attempt,) = last().attempts
    assert attempt.accepted, attempt.message
    assert "float64" in attempt.engine["verified"]["against"]


class Unfaithful(Scale):
    """Declares that it keeps the numbers, and doubles every cosine."""

    keeps_numbers = True


class Faithful(CosineToSine):
    """Writes every cosine as a sine of its complement."""

    keeps_numbers = True

    def run(self, gm: torch.fx.GraphModule) -> None:
        for node in cosines(gm):
            with gm.graph.inserting_before(node):
                shifted = gm.graph.call_function(aten.add.Tensor, (node.args[0], torch.pi / 2))
            node.target, node.args = aten.sin.default, (shifted,)


STAGES = ("torch", "aten", "joint", "post_grad")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_pass_that_keeps_numbers_against_its_word_is_rolled_back(
    stage: str, training: bool
) -> None:
    """The engines and the eager fallback run the graph without it."""
    x = torch.linspace(-1, 1, 6, requires_grad=training)
    f = compiled(torch.cos, "aot_eager", verify="compile", passes=[at(stage, Unfaithful)])
    with pytest.warns(FallbackWarning, match="pass 'unfaithful' broke the rule 'numbers'"):
        torch.testing.assert_close(f(x), x.cos())
    (record,) = last().passes
    assert not record.changed
    assert "broke the rule 'numbers': output 0 is off by 0.98" in record.error
    assert last().attempts[0].engine["verified"]["against"] == "eager"


@pytest.mark.parametrize("stage", STAGES)
def test_pass_that_breaks_its_word_raises_where_the_policy_says_so(stage: str) -> None:
    """As for any other rule of a pass."""
    options = {"verify": "compile", "on_pass_error": "raise"}
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.cos, "aot_eager", passes=[at(stage, Unfaithful)], **options)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, PassError)
    assert caught.value.inner_exception.rule == "numbers"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_record_says_what_was_compared_with_what(stage: str, training: bool) -> None:
    """The engine with the graph that passes left, and that with eager where they declare it."""
    said = {}
    for changes in (Faithful, CosineToSine):
        torch.compiler.reset()
        x = torch.linspace(-1, 1, 6, requires_grad=training)
        compiled(torch.cos, "aot_eager", verify="compile", passes=[at(stage, changes)])(x)
        assert last().passes[0].changed, last().passes[0].error
        found = last().attempts[0].engine["verified"]
        said[changes] = found["against"], found["rewritten_graph"]
    assert said == {
        Faithful: ("the rewritten graph", "compared with eager"),
        CosineToSine: (
            "the rewritten graph",
            "not compared with eager: cosine_to_sine may change numbers",
        ),
    }


def test_pass_behind_one_that_may_change_numbers_is_compared_with_what_that_left() -> None:
    """Neither hides the other."""
    for kept in (Faithful, Unfaithful):
        torch.compiler.reset()
        passes = [at("aten", Scale), at("aten", kept)]
        compiled(torch.cos, "aot_eager", verify="compile", passes=passes)(torch.ones(3))
        assert [each.changed for each in last().passes] == [True, kept is Faithful]
        told = last().attempts[0].engine["verified"]["rewritten_graph"]
        assert told == "not compared with eager: scale may change numbers"


def test_passes_are_not_compared_where_the_policy_compares_nothing() -> None:
    """It would cost runs of eager that nobody asked for."""
    x = torch.ones(3)
    got = compiled(torch.cos, "aot_eager", passes=[at("aten", Unfaithful)])(x)
    assert torch.equal(got, 2 * x.cos())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inductor", "onnxrt"])
@pytest.mark.parametrize("training", [False, True])
def test_real_engines_are_not_rejected(engine: str, training: bool) -> None:
    """Convolutions, norms, attention, softmax; forward and gradients."""

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(8)
            self.qkv = torch.nn.Linear(8, 24)
            self.out = torch.nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = functional.gelu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            return self.out(functional.scaled_dot_product_attention(q, k, v) + x.unsqueeze(1))

    with torch.set_grad_enabled(training):
        compiled(Mixed().train(training), engine, verify="compile")(torch.randn(2, 3, 8, 8))
    (attempt,) = last().attempts
    assert attempt.accepted, attempt.message
    assert attempt.engine["verified"]["values"] > 1


class Noise(torch.nn.Module):
    """As in a variational autoencoder."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x) * 0.1 + torch.rand(x.shape[1:]) - torch.rand_like(x)


@pytest.mark.parametrize(
    ("engine", "random"),
    [
        *thorough(("inductor", torch.nn.Dropout(0.1))),
        *(("onnxrt", each) for each in (torch.nn.Dropout(0.0), torch.nn.Dropout(0.1), Noise())),
    ],
)
def test_gradients_of_which_only_rounding_is_left_are_compared_by_the_size_of_the_others(
    engine: str, random: torch.nn.Module
) -> None:
    """A bias before a batch norm has no effect: each engine rounds its gradient to other noise."""
    few = [] if engine == "inductor" else [(4, 5)]  # a size more is a compiler's run more
    for rows, seed in (*few, (16, 8), (16, 11)):
        torch.compiler.reset()
        torch.manual_seed(seed)
        linear, norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
        after = torch.nn.ReLU(), random, torch.nn.Linear(8, 2)
        model = torch.nn.Sequential(linear, norm, *after)
        compiled(model, engine, verify="compile")(torch.randn(rows, 8))
        (attempt,) = last().attempts
        assert attempt.accepted, (seed, attempt.message)


@upstream
@pytest.mark.parametrize(("batch", "right"), [(1, False), (2, True)])
def test_eager_is_wrong_about_a_batch_norm_of_one_image(batch: int, right: bool) -> None:
    """The day it is not, a paragraph of docs/explanation/verify.md may go (torch 2.12 and 2.13)."""
    norm = torch.nn.BatchNorm2d(3)

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return norm(x).flatten(2).mT

    images, weight = torch.randn(batch, 3, 2, 2), torch.randn(batch, 4, 3)
    (tokens(images) * weight).sum().backward()
    assert torch.allclose(norm.bias.grad, weight.sum((0, 1)), atol=1e-5) == right
    compiled(tokens, "onnxrt", verify="compile")(images)
    assert last().attempts[0].accepted == right


def test_gradient_that_is_small_and_right_in_eager_has_to_be_right() -> None:
    """Only where eager's own is nothing but rounding do the others' sizes count."""
    small, zero = T([1e-6]), T([0.0])
    assert mismatch_of(zero, small, small.double(), Bounds(), largest=1.0)
    noise = small.double() * 1e-3
    assert mismatch_of(zero, small, noise, Bounds(), largest=1.0) is None
    assert mismatch_of(T([1e-4]), small, noise, Bounds(), largest=1.0)
    assert mismatch_of(T([1e-3]), small, noise, LowPrecisionBounds(), largest=1.0) is None


T = torch.tensor


@pytest.mark.parametrize(
    ("got", "expected", "mismatch"),
    [
        (T([1.0, 2.0]), T([1.0, 2.0]), None),
        (T([1.0, 2.0005]), T([1.0, 2.0]), None),
        (T([1.0, 2.1]), T([1.0, 2.0]), Mismatch.NUMBERS),
        (T([0.0, 1e-4, 1.0]), T([0.0, 0.0, 1.0]), None),
        (T([1.0, float("nan")]), T([1.0, 2.0]), Mismatch.NON_FINITE),
        (T([1.0, float("inf")]), T([1.0, 2.0]), Mismatch.NON_FINITE),
        (T([1.0, float("nan")]), T([1.0, float("nan")]), None),
        (T([float("inf")]), T([-float("inf")]), Mismatch.NUMBERS),
        (T([1.0]), T([float("nan")]), Mismatch.NUMBERS),
        (T([1, 2]), T([1, 3]), Mismatch.NUMBERS),
        (T([True]), T([False]), Mismatch.NUMBERS),
        (T([1.0]), T([[1.0]]), Mismatch.STRUCTURE),
        (T([1.0]).double(), T([1.0]), Mismatch.STRUCTURE),
        (3, 3, None),
        (3, 4, Mismatch.STRUCTURE),
        (None, T([1.0]), Mismatch.STRUCTURE),
        (T([]), T([]), None),
        (T([1 + 1j]), T([1 + 1j]), None),
        (T([1 + 2j]), T([1 + 1j]), Mismatch.NUMBERS),
    ],
)
def test_mismatch_of_a_value(got: Any, expected: Any, mismatch: Mismatch | None) -> None:
    """Structure, then NaN and infinity, then numbers."""
    found = mismatch_of(got, expected, None, Bounds())
    assert (found[0] if found else None) is mismatch


def test_errors_are_absolute_relative_and_an_angle() -> None:
    """Against the root mean square of what is expected."""
    errors = errors_of(T([3.0, 4.5]), T([3.0, 4.0]))
    assert errors.absolute == pytest.approx(0.5)
    assert errors.relative == pytest.approx(0.5 / (12.5**0.5))
    assert 0.99 < errors.cosine < 1


@pytest.mark.parametrize("claims", [False, True])
def test_engine_that_claims_to_keep_nan_is_held_to_it(claims: bool) -> None:
    """On inputs with a NaN; one that claims nothing is not asked."""

    def hides(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        current_build().facts.keeps_nan = claims
        return lambda x: [each.nan_to_num(0.0) for each in gm.forward(x)]

    x = torch.randn(3, 4)
    f = compiled(torch.relu, hides, verify="compile")
    assert torch.equal(f(x), x.relu())
    (attempt,) = last().attempts
    assert attempt.reason == ("non_finite" if claims else None)
    assert "NaN" in attempt.message or not claims


def _raises_on(x: torch.Tensor) -> Any:
    raise ZeroDivisionError("a mean of no numbers")


@pytest.mark.parametrize(
    ("on_nan", "reason"),
    [
        (_raises_on, "raised_at_runtime"),
        (lambda x: None, "output_mismatch"),
        (lambda x: [3], "output_mismatch"),
        (lambda x: [x[:1]], "output_mismatch"),
        (lambda x: [], "output_mismatch"),
        (lambda x: [x.long()], "output_mismatch"),
    ],
)
def test_engine_that_cannot_take_the_nan_that_it_claims_to_keep_is_refused(
    on_nan: Callable[[torch.Tensor], Any], reason: str
) -> None:
    """With the reason that the first inputs would have given."""

    def engine(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        current_build().facts.keeps_nan = True
        return lambda x: on_nan(x) if x.isnan().any() else gm.forward(x)

    x = torch.randn(3, 4)
    assert torch.equal(compiled(torch.relu, engine, verify="compile")(x), x.relu())
    assert last().attempts[0].reason == reason


NANS_IN_A_GRID = """
import torch
from composer.build import current_build

def engine(gm, inputs):
    current_build().facts.keeps_nan = True
    return lambda *args: [each * 1 for each in gm.forward(*args)]

def sampled(x, grid):
    return torch.nn.functional.grid_sample(x, grid, padding_mode="border")

x, grid = torch.rand(2, 3, 5, 20, requires_grad=True), torch.rand(2, 13, 10, 2)
"""
VERIFIED = """
options = {"chain": [engine], "verify": "compile"}
grid.requires_grad_()
torch.compile(sampled, backend="composer", options=options)(x, grid).sum().backward()
"""
BACKWARD_OF_TORCH = """
grid[0, 0, 0, 0] = torch.nan
grid.requires_grad_()
sampled(x, grid).sum().backward()
"""


def test_no_backward_meets_the_nan(run_python) -> None:
    """Torch's own of grid_sample would end the process, of a program that has no NaN at all."""
    done = run_python(NANS_IN_A_GRID + VERIFIED)
    assert done.returncode == 0, done.stderr


@upstream
def test_a_backward_of_torch_ends_the_process_at_a_nan(run_python) -> None:
    """Gradients may be compared on inputs with a NaN when it does not (torch 2.13 does)."""
    assert run_python(NANS_IN_A_GRID + BACKWARD_OF_TORCH).returncode < 0
