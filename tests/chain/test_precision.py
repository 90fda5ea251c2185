"""``precision``: products in bfloat16 where the policy wants them, and ``auto`` where they hold."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import compiled, in_threads, last
from spies import Spy, cancels, error, layers, told
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, scaled_dot_product_attention

import composer
from composer import Policy, _torch
from composer.backends.base import Backend, Build, BuildFacts, BuildRequest, current_build
from composer.chain import precision
from composer.chain.sandbox import parcel
from composer.records import Attempt, Status, plain
from composer.testing import FakeBackend, expect

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with bf16 arithmetic, whatever the tests run on."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: True)


def check(module: Callable[..., Any], *inputs: Any, chain: Any = None, **options: Any) -> Spy:
    """Compile and compare: close to eager, and not the same."""
    spy = Spy()
    with torch.no_grad():
        got = compiled(module, chain or spy, **{"precision": "bf16"} | options)(*inputs)
        expected = module(*inputs)
    assert got.dtype == expected.dtype == torch.float32
    assert got.stride() == expected.stride()
    assert 0 < error(got, expected) < 0.02
    return spy


def test_products_take_bf16_and_return_fp32() -> None:
    """The engine is given weights in bfloat16; all between the products is in float32."""
    spy = check(layers(), torch.randn(4, 32))
    assert spy.products == [{torch.bfloat16}, {torch.bfloat16}]
    assert spy.given == [torch.bfloat16] * 2 + [torch.float32] + [torch.bfloat16] * 2
    (gelu,) = spy.gm.graph.find_nodes(op="call_function", target=aten.gelu.default)
    assert gelu.meta["val"].dtype is torch.float32
    engine = last().attempts[0].engine
    assert (engine["precision"], engine["products_in_bf16"]) == ("bf16", 2)
    assert "tentative" not in engine


def test_fp32_is_the_default_and_leaves_no_trace() -> None:
    """Neither in the graph, nor in the record, nor in the key of a policy."""
    spy = Spy()
    compiled(layers(), spy)(torch.randn(4, 32))
    assert (spy.products, last().attempts[0].engine) == ([], {})
    assert Policy(precision={"mode": "fp32", "max_error": 0.5}).key == Policy().key
    keys = {Policy(precision=each).key for each in ("fp32", "bf16", "auto")}
    assert len(keys | {Policy(precision={"mode": "auto", "max_error": 0.5}).key}) == 4


@pytest.mark.parametrize("engine", ["inductor", "onnxrt"])
def test_real_engines_take_it(engine: str) -> None:
    """Inductor compiles such a graph; what ONNX Runtime has no kernel for stays torch's."""
    if engine == "onnxrt":
        pytest.importorskip("onnxruntime")
    check(layers(), torch.randn(4, 32), chain=engine, min_coverage=0.0, verify="compile")
    assert last().chosen == engine
    assert last().attempts[0].engine["precision"] == "bf16"


class Attention(nn.Module):
    """Self-attention whose products have only views between them, and a mask in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = scaled_dot_product_attention(q, k, v, mask)
        return self.out(seen.transpose(1, 2).flatten(2))


def test_views_between_products_stay_in_bf16() -> None:
    """Rounded once, at the first; a mask keeps its values: the least float32 is no infinity."""
    mask = torch.zeros(1, 1, 7, 7)
    mask[..., 0, :] = mask[..., 5:] = torch.finfo(torch.float32).min
    spy = check(Attention().eval(), torch.randn(2, 7, 32), mask)
    dtypes = [{torch.bfloat16}, {torch.bfloat16, torch.float32}, {torch.bfloat16}]
    assert spy.products == dtypes
    assert len(spy.gm.graph.find_nodes(op="call_function", target=aten.to.dtype)) == 2


def test_convolution_and_batch_norm() -> None:
    """The norm stays in float32; what writes in place finds the product's own memory."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    module = nn.Sequential(module, nn.Conv2d(8, 4, 3)).eval()
    spy = check(module, torch.randn(2, 3, 9, 9))
    assert spy.products == [{torch.bfloat16}, {torch.bfloat16}]


@pytest.mark.parametrize(
    "equation", ["ij,jk", "ij,jk->ik", "...ij, ...jk -> ...ik", "ij,ij->", "ij,ij->i"]
)
def test_einsum_that_sums_what_it_multiplies(equation: str) -> None:
    """Other einsums are no products (``test_graphs_with_nothing_to_lower``)."""
    f = compiled(lambda x: torch.einsum(equation, x, x), Spy(), precision="bf16")
    x = torch.rand(8, 8)
    assert 0 < error(f(x), torch.einsum(equation, x, x)) < 0.02
    assert last().attempts[0].engine["products_in_bf16"] == 1


def test_what_is_written_in_place_is_rounded_where_it_is_read() -> None:
    """Not where it was computed."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        first = y.view(4, 4) @ w
        y.mul_(-3)
        return first + y.view(4, 4) @ w

    check(f, torch.randn(4, 4), torch.randn(4, 4))
    assert last().attempts[0].engine["products_in_bf16"] == 3


def test_weight_read_in_both_precisions() -> None:
    """A tied embedding is looked up in float32, and multiplied by in bfloat16."""
    embedding = nn.Embedding(50, 16)

    def f(ids: Tensor) -> Tensor:
        return linear(embedding(ids).square(), embedding.weight)

    spy = check(f, torch.arange(5))
    assert sorted(map(str, spy.given)) == ["torch.bfloat16", "torch.float32", "torch.int64"]


def test_casts_of_the_users_own_stay() -> None:
    """What they give belongs to the user, who may write to it: the copies are composer's."""
    weight = nn.Parameter(torch.randn(8, 8))

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight, weight.to(torch.bfloat16)

    g, x = compiled(f, Spy(), precision="bf16"), torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(2):
            product, own = g(x)
            assert torch.equal(own, weight.to(torch.bfloat16))
            assert error(product, x @ weight) < 0.02
            own.zero_()


@pytest.mark.parametrize("change", ["in_place", "data", "state_dict", "step", "refresh"])
def test_changed_weights_are_seen(change: str) -> None:
    """Whichever way they change, as by every engine that takes weights in."""
    module, x = layers(), torch.randn(4, 32)
    f = compiled(module, Spy(), precision="bf16")
    with torch.no_grad():
        before = f(x)
        weight = module[0].weight
        if change == "in_place":
            weight.mul_(-2)
        elif change == "data":
            weight.data = -2 * weight.data
        elif change == "state_dict":
            module.load_state_dict({k: -2 * v for k, v in module.state_dict().items()})
        elif change == "step":
            weight.grad = 3 * weight.detach()
            torch.optim.SGD([weight], lr=1.0).step()
        else:
            weight.data.mul_(-2)
            composer.refresh()
        assert error(f(x), module(x)) < 0.02
        assert error(f(x), before) > 0.1
    assert len(composer.reports()) == 1


@pytest.mark.parametrize("by", ["data", "numpy"])
def test_writes_that_raise_no_version_are_seen_in_small_buffers(by: str) -> None:
    """Those are compared by value. Codebooks are kept so."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(32, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.codes

    module, x = Codes(), torch.randn(4, 32)
    f = compiled(module, Spy(), precision="bf16")
    with torch.no_grad():
        for _ in range(3):
            assert error(f(x), module(x)) < 0.02
            if by == "data":
                module.codes.data.mul_(-2)
            else:
                module.codes.numpy()[:] *= -2


def test_a_copy_keeps_its_place_when_its_weight_changes() -> None:
    """What engines were given is written to, so that they see one weight that changes."""
    weight = nn.Parameter(torch.randn(8, 8))
    given: list[int] = []

    def engine(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        run = Spy()(gm, inputs)

        def call(*args: Any) -> Any:
            given.extend(id(each) for each in args if each.dtype is torch.bfloat16)
            return run(*args)

        return call

    f, x = compiled(lambda x: weight @ x, engine, precision="bf16"), torch.randn(8, 2)
    with torch.no_grad():
        for _ in range(3):
            assert error(f(x), weight @ x) < 0.02
            weight.mul_(-2)
    assert len(given) == 3
    assert len(set(given)) == 1


def test_weight_seen_otherwise_is_rounded_anew() -> None:
    """Its memory and its version are the same; Dynamo compiles the other strides anew."""
    weight = nn.Parameter(torch.randn(8, 8))
    f, x = compiled(lambda x: x @ weight, Spy(), precision="bf16"), torch.randn(2, 8)
    with torch.no_grad():
        f(x)
        weight.data = weight.data.t()
        assert error(f(x), x @ weight) < 0.02


def test_copies_are_shared_and_die_with_their_engines() -> None:
    """Two graphs that read one weight have one copy of it; without engines there is none."""
    weight = nn.Parameter(torch.randn(8, 8))
    seen: list[weakref.ref[Tensor]] = []

    def engine(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.extend(weakref.ref(each) for each in inputs if each.dtype is torch.bfloat16)
        return Spy()(gm, inputs)

    functions = [
        compiled(each, engine, precision="bf16")
        for each in (lambda x: weight @ x, lambda x: weight.t() @ x)
    ]
    with torch.no_grad():
        for each in functions:
            each(torch.randn(8, 2))
    assert len(seen) == 2
    assert seen[0]() is seen[1]() is not None
    torch.compiler.reset()
    composer.reset()
    functions.clear()
    gc.collect()
    assert seen[0]() is None


def test_one_engine_serves_the_weights_of_two_modules() -> None:
    """Dynamo compiles their common code once."""
    x, modules = torch.randn(2, 32), [layers(), layers()]

    def f(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    g = compiled(f, Spy(), precision="bf16")
    with torch.no_grad():
        for _ in range(2):
            for module in modules:
                assert error(g(module, x), module(x)) < 0.02


def test_threads_share_an_engine() -> None:
    """And see a weight that was changed before their call."""
    module, x = layers(), torch.randn(4, 32)
    f = compiled(module, Spy(), precision="bf16")
    off: list[float] = []

    def call() -> None:
        with torch.no_grad():
            off.append(error(f(x), module(x)))

    call()
    with torch.no_grad():
        module[0].weight.mul_(-1)
    in_threads(lambda _: call(), range(4))
    assert len(off) == 5
    assert max(off) < 0.02


def test_inference_tensors_are_rounded_at_each_call() -> None:
    """Nobody could see them change."""
    with torch.inference_mode():
        module, x = layers(), torch.randn(4, 32)
        f = compiled(module, Spy(), precision="bf16")
        f(x)
        module[0].weight.mul_(-2)
        assert 0 < error(f(x), module(x)) < 0.02


def test_dynamic_sizes_are_one_graph() -> None:
    """Weights keep their sizes, inputs have symbols."""
    module = Attention().eval()
    with torch.no_grad(), expect(graphs=1, served_by="spy"):
        f = compiled(module, Spy(), precision="bf16", dynamic=True)
        for size in (5, 7, 11):
            x, mask = torch.randn(2, size, 32), torch.zeros(1, 1, size, size)
            assert error(f(x, mask), module(x, mask)) < 0.02
    assert last().dynamic


def test_a_product_added_to_dynamic_sizes_is_lowered() -> None:
    """Whose kernel for fake tensors expands what it adds to, by symbols."""

    def scores(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return bias.baddbmm(a, b)

    check(scores, torch.ones(2, 1, 5), torch.rand(2, 3, 6), torch.rand(2, 6, 5), dynamic=True)
    assert told() == [("spy", "bf16", "succeeded", None)]


def test_auto_takes_bf16_where_it_holds() -> None:
    """The first of each pair is accepted; the record says how far it is off."""
    module, x = layers(), torch.randn(4, 32)
    with torch.no_grad():
        got = compiled(module, Spy("a"), Spy("b"), precision="auto")(x)
        assert 0 < error(got, module(x)) < 0.01
    assert told() == [("a", "bf16", "succeeded", None)]
    engine = last().attempts[0].engine
    assert engine["tentative"]
    assert engine["verified"]["max_absolute_error"] > 0


@pytest.mark.filterwarnings("error::composer.errors.FallbackWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_auto_takes_fp32_where_bf16_does_not_hold(strict: bool) -> None:
    """Compared though ``verify`` is off; no news, and no error under ``strict``."""
    x = torch.rand(4, 16)
    f = compiled(cancels, Spy(), precision="auto", strict=strict, on_exhausted="raise")
    assert torch.equal(f(x), cancels(x))
    assert told() == [
        ("spy", "bf16", "rejected", "numeric_mismatch"),
        ("spy", "fp32", "succeeded", None),
    ]


def test_max_error_is_the_largest_error_over_the_largest_number() -> None:
    """Of each value by itself; what is just within is taken, what is just without is not."""
    module, x = nn.Linear(32, 8), torch.randn(4, 32)
    with torch.no_grad():
        off = error(compiled(module, Spy(), precision="bf16")(x), module(x))
        for share, served in ((1.05, "bf16"), (0.95, "fp32")):
            torch.compiler.reset()
            compiled(module, Spy(), precision={"mode": "auto", "max_error": share * off})(x)
            assert last().attempts[-1].engine["precision"] == served


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_bf16_is_compared_where_the_user_asks() -> None:
    """Asked for by name it serves unseen, but for ``verify``; ``max_error`` judges it then."""
    x = torch.rand(4, 16)
    f = compiled(cancels, Spy(), precision="bf16")
    assert error(f(x), cancels(x)) > 0.01
    torch.compiler.reset()
    f = compiled(cancels, Spy(), precision="bf16", verify="compile")
    assert torch.equal(f(x), cancels(x))
    assert told() == [("spy", "bf16", "rejected", "numeric_mismatch")]
    assert "spy in bf16 rejected" in last().attempts[0].sentence()


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
@pytest.mark.parametrize("verify", ["compile", "sample"])
def test_graph_that_stays_in_fp32_is_judged_as_such(verify: str) -> None:
    """By the tolerances of float32, though the policy says bf16: it has no product."""
    calls = iter(range(10))

    def half_a_percent_off(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        right = 1 if verify == "sample" else 0
        return lambda x: gm.forward(x) if next(calls) < right else (x.sin() * 1.005,)

    f = compiled(
        torch.sin, half_a_percent_off, Spy(), precision="bf16", verify={"when": verify, "every": 1}
    )
    x = torch.rand(4, 4)
    assert torch.equal(f(x), x.sin())
    assert told()[0] == ("half_a_percent_off", "fp32", "rejected", "numeric_mismatch")


def test_products_within_a_branch_stay_in_fp32_and_the_record_says_so() -> None:
    """Nested graphs are left as they are."""
    layer = torch.nn.Linear(4, 4)

    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, layer, torch.sin, (x,))

    with torch.no_grad():
        compiled(branches, "aot_eager", precision="bf16")(torch.ones(4, 4))
    said = last().attempts[0].engine["not_in_bf16"]
    assert said.startswith("it has no product or convolution of float32 outside of nested graphs")


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
@pytest.mark.parametrize("precision", ["fp32", "auto"])
def test_engine_that_is_in_bf16_by_itself_is_judged_by_what_was_asked(precision: str) -> None:
    """As one told so by an option of its own: the policy wants float32."""

    def low(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        current_build().facts.precision = "bf16"
        return lambda x: (x.sin() * 1.005,)

    f, x = compiled(torch.sin, low, precision=precision, verify="compile"), torch.rand(4, 4)
    assert torch.equal(f(x), x.sin())
    assert told()[-1] == ("low", "bf16", "rejected", "numeric_mismatch")


def test_sampled_calls_are_judged_by_who_serves() -> None:
    """By ``max_error`` while that is bf16."""
    module, x = layers(), torch.randn(4, 32)
    f = compiled(module, Spy(), precision="auto", verify={"when": "sample", "every": 2})
    with torch.no_grad(), expect(graphs=1, calls=4, verified=2, fallbacks=0):
        for _ in range(4):
            f(x)
    assert told() == [("spy", "bf16", "succeeded", None)]


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_fastest_measures_both() -> None:
    """One of them serves, the other is slower than it, by its full name."""
    module, x = layers(), torch.randn(4, 32)
    options = {"precision": "auto", "select": {"by": "fastest", "seconds": 0.4}}
    with torch.no_grad():
        assert error(compiled(module, Spy(), **options)(x), module(x)) < 0.01
    low, full = last().attempts
    assert [low.engine["precision"], full.engine["precision"]] == ["bf16", "fp32"]
    assert {str(each.reason) for each in (low, full)} <= {"slower", "None"}
    assert "ms" in low.engine["timing"]
    assert "ms" in full.engine["timing"]
    if low.accepted:
        assert "spy in bf16 takes" in full.message


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_runtime_failure_in_bf16_leaves_fp32_of_the_same_engine() -> None:
    """The one that failed is in quarantine for this graph, its twin is not."""
    module, x = layers(), torch.randn(4, 32)
    fails = FakeBackend("raises", at=3)  # the comparison is its first call
    f = compiled(module, fails, precision="auto")
    with torch.no_grad(), expect(graphs=1, fallbacks=1, calls=4):
        for _ in range(4):
            assert error(f(x), module(x)) < 0.01
    assert told()[0] == ("fake_raises", "bf16", "failed", "raised_at_runtime")
    assert told()[1] == ("fake_raises", "fp32", "succeeded", None)
    torch.compiler.reset()
    with torch.no_grad():
        compiled(module, fails, precision="auto")(x)
    assert told()[0] == ("fake_raises", None, "skipped", "quarantined")
    assert told()[1][1:3] == ("fp32", "succeeded")


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_successor_at_run_time_computes_in_bf16() -> None:
    """Also of a dynamic graph, whose symbols nobody could capture any more."""
    module, second = layers(), Spy("second")
    f = compiled(module, FakeBackend("raises", at=2), second, precision="bf16", dynamic=True)
    with torch.no_grad():
        for size in (3, 4, 5, 6):
            x = torch.randn(size, 32)
            assert error(f(x), module(x)) < 0.02
        assert error(f(x), module(x)) > 0
    assert last().chosen == "second"
    assert second.products == [{torch.bfloat16}, {torch.bfloat16}]
    assert len(composer.reports()) == 1


def test_training_is_left_alone_by_auto() -> None:
    """Nothing is tried in bf16, and the record says why."""
    module, x = layers(), torch.randn(4, 32)
    got = compiled(module, Spy(), precision="auto")(x)
    assert torch.equal(got, module(x))
    assert told() == [("spy", None, "skipped", "policy"), ("spy", "fp32", "succeeded", None)]
    assert last().attempts[0].message == "not tried in bf16: the graph trains"


def test_training_in_bf16_where_it_is_asked_for() -> None:
    """Gradients flow through the casts and arrive in float32; weights may change every step."""
    module, x = layers(), torch.randn(4, 32)
    f = compiled(module, Spy(), precision="bf16")
    for _ in range(2):
        gradients = []
        for run in (f, module):
            module.zero_grad()
            run(x).square().sum().backward()
            gradients.append([each.grad.clone() for each in module.parameters()])
        assert all(0 < error(a, b) < 0.05 for a, b in zip(*gradients, strict=True))
        with torch.no_grad():
            module[0].weight.mul_(-1)


@pytest.mark.parametrize("of", ["a product", "a weight"])
def test_gradient_does_not_pass_a_view_that_was_made_without_grad(of: str) -> None:
    """It is cut off there, as in eager."""
    weight, other = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def f(x: Tensor) -> Tensor:
        y = x @ weight
        with torch.no_grad():
            z = y.view(8, 8) if of == "a product" else weight.t()
        return (z @ other).sum() + y.sum()

    x = torch.randn(8, 8)
    compiled(f, Spy(), precision="bf16")(x).backward()
    got, weight.grad = weight.grad, None
    f(x).backward()
    assert 0 <= error(got, weight.grad) < 0.02


def test_gradient_passes_a_cast_that_was_made_without_grad() -> None:
    """One made in a region without grad is not used outside of it."""
    weight = nn.Parameter(torch.randn(8, 8))

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x @ weight).abs().max()
        return (x @ weight) / scale

    x = torch.randn(4, 8)
    compiled(f, Spy(), precision="bf16")(x).sum().backward()
    got, weight.grad = weight.grad, None
    f(x).sum().backward()
    assert 0 < error(got, weight.grad) < 0.02


@pytest.mark.parametrize(
    ("function", "dtype", "why"),
    [
        (lambda x: x.sin(), torch.float32, "no product or convolution of float32"),
        (lambda x: x @ x, torch.float64, "no product or convolution of float32"),
        (lambda x: x @ x, torch.bfloat16, "no product or convolution of float32"),
        (torch.autocast("cpu", torch.bfloat16)(lambda x: x @ x), torch.float32, "no product"),
        (lambda x: torch.einsum("i, j -> ij", x[0], x[1]), torch.float32, "no product"),
        (lambda x: torch.einsum("ij,ij->ij", x, x), torch.float32, "no product"),
        (lambda x: torch.einsum("ij->i", x), torch.float32, "no product"),
        (lambda x: torch.einsum("ii->i", x.clone()).mul_(2), torch.float32, "no product"),
    ],
    ids=[
        *("no product", "float64", "bfloat16", "autocast"),
        *("outer product", "elementwise", "sums of rows", "diagonal"),
    ],
)
def test_graphs_with_nothing_to_lower(function: Any, dtype: torch.dtype, why: str) -> None:
    """Under ``auto`` nobody builds them twice; under ``bf16`` they are compiled as they are."""
    x = torch.rand(4, 4).to(dtype)
    for each, statuses in (("auto", ["skipped", "succeeded"]), ("bf16", ["succeeded"])):
        torch.compiler.reset()
        assert torch.equal(compiled(function, Spy(), precision=each)(x), function(x))
        assert [a.status for a in last().attempts] == statuses
    assert last().attempts[0].engine["precision"] == "fp32"
    assert why in last().attempts[0].engine["not_in_bf16"]


def test_autocast_around_the_call_decides() -> None:
    """There the user chose a precision."""
    module, x = layers(), torch.randn(4, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = compiled(module, Spy(), precision="auto")(x)
        assert got.dtype is torch.bfloat16
    assert "torch.autocast" in last().attempts[0].message


def test_processor_without_bf16_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``auto``: emulated it is slower."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: False)
    with torch.no_grad():
        compiled(layers(), Spy(), precision="auto")(torch.randn(4, 32))
    assert told()[0][2:] == ("skipped", "policy")
    assert "this processor has no bf16 arithmetic" in last().attempts[0].message


def test_random_numbers_that_are_not_eagers_are_not_trusted() -> None:
    """``auto`` takes nothing whose numbers it could not compare."""

    def other_draw(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        run = Spy()(gm, inputs)

        def compiled_graph(*args: Any) -> Any:
            torch.rand(3)
            return run(*args)

        return compiled_graph

    w = torch.randn(8, 8)
    compiled(lambda x: dropout(x @ w, 0.5), other_draw, precision="auto")(torch.randn(2, 8))
    assert last().attempts[0].message == "in bf16 its numbers could not be compared"
    assert last().attempts[1].accepted


class Chooses(Backend):
    """An engine that sets its own precision, and says what it was asked for."""

    chooses_precision = True
    asked: list[str]

    def build(self, request: BuildRequest) -> Build:
        self.asked.append(request.terms.precision)
        assert {each.dtype for each in request.example_inputs} == {torch.float32}
        backend = _torch.dynamo.lookup_backend("aot_eager")
        return Build(backend(request.gm, request.example_inputs))


def test_engine_that_chooses_its_precision_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And given the graph as it is."""
    engine = Chooses()
    engine.asked = []
    monkeypatch.setattr("composer.chain.candidates.find_backend", lambda _: engine)
    with torch.no_grad():
        compiled(layers(), "some", precision="bf16")(torch.randn(4, 32))
        torch.compiler.reset()
        options = {"precision": "auto", "select": {"by": "fastest", "seconds": 0.01}}
        compiled(layers(), "some", **options)(torch.randn(4, 32))
        torch.compiler.reset()
        compiled(layers(), "some")(torch.randn(4, 32))
    assert engine.asked == ["bf16", "bf16", "fp32", "fp32"]
    assert current_build().precision == "fp32"


def test_child_process_is_sent_what_is_built_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewritten graph, with its rounded weights; an engine that chooses is told again there."""
    sent: list[Any] = []

    def ask(_: str, payload: bytes, __: Any) -> Any:
        (entry,), _, (_, inputs), *_ = parcel.opened(parcel.unpack(payload))
        sent.append((inputs[0].dtype, entry.precision, entry.told))
        done = plain(Attempt("", Status.SUCCEEDED, None, "", 0.0))
        return {"attempts": [done], "ranking": [0], "lasts": True}

    monkeypatch.setattr("composer.system.subprocesses.ask", ask)
    engine = Chooses()
    engine.asked = []
    options = {"precision": "bf16", "isolate": True}
    with torch.no_grad():
        compiled(layers(), "aot_eager", **options)(torch.randn(4, 32))
        torch.compiler.reset()
        monkeypatch.setattr("composer.chain.candidates.find_backend", lambda _: engine)
        compiled(layers(), "some", **options)(torch.randn(4, 32))
    assert sent == [(torch.bfloat16, "bf16", "fp32"), (torch.float32, "bf16", "bf16")]


def test_passes_of_the_user_come_first_and_the_floor_stays() -> None:
    """The rewrite is none of the shared passes: they are recorded, and eager runs them."""
    module, x = layers(), torch.randn(4, 32)
    options = {"passes": ["remove_no_ops"], "precision": "bf16"}
    with torch.no_grad():
        f = compiled(module, FakeBackend("raises", at=1), on_exhausted="eager", **options)
        with pytest.warns(composer.errors.FallbackWarning):
            assert torch.equal(f(x), module(x))
    assert [each.name for each in last().passes] == ["remove_no_ops"]


def test_graph_is_rewritten_once_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all candidates, at run time too; nothing keeps the captured graph alive for that."""
    rewrites: list[weakref.ref[torch.fx.GraphModule]] = []
    rewrite = precision.before_autograd.rewrite

    def counting(request: Any, *how: Any, **more: Any) -> Any:
        rewrites.append(weakref.ref(request.gm))
        return rewrite(request, *how, **more)

    monkeypatch.setattr(precision.before_autograd, "rewrite", counting)
    chain = [Spy("a"), Spy("b"), Spy("c")]
    options = {"precision": {"mode": "auto", "max_error": 1e-9}}
    with torch.no_grad():
        compiled(cancels, *chain, select={"by": "fastest", "seconds": 0.01}, **options)(
            torch.ones(2, 4)
        )
    asked = [each for each in rewrites if each() is not None]
    assert asked
    assert len({id(each()) for each in asked}) == 1
    torch.compiler.reset()
    composer.reset()
    chain.clear()
    for _ in range(2):  # with Python 3.12 what Dynamo let go of is garbage at the second look only
        gc.collect()
    assert all(each() is None for each in asked)


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
@pytest.mark.parametrize("verify", ["compile", "sample"])
def test_what_an_engine_says_of_its_precision_loosens_no_bounds(verify: str) -> None:
    """The graph has no product, so it is not rewritten, and is held to float32's numbers."""
    off = 0.0 if verify == "sample" else 0.005

    def low(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        current_build().facts.precision = "bf16"
        current_build().facts.extra["products_in_bf16"] = 1
        return lambda x: (x.sin() * (1 + off),)

    x = torch.rand(4, 4)
    f = compiled(torch.sin, low, precision="bf16", verify={"when": verify, "every": 2})
    f(x)
    off = 0.005
    for _ in range(2):
        f(x)
    assert told()[-1] == ("low", "bf16", "rejected", "numeric_mismatch")
    (attempt,) = (each for each in last().attempts if each.backend == "low")
    assert (attempt.precision, attempt.who) == ("fp32", "low")


class LowByOption(Backend):
    """Computes in bfloat16 by an option of its own, as TensorRT can."""

    def build(self, request: BuildRequest) -> Build:
        precision = request.options["precision"]
        return Build(lambda x: (x.sin() * 1.005,), BuildFacts(precision=precision))


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_option_of_an_engine_loosens_no_bounds_and_is_not_the_policys_precision() -> None:
    """The graph could not be rewritten, so the engine is held to float32's numbers."""
    engine, x = {"backend": LowByOption, "options": {"precision": "bf16"}}, torch.rand(4, 4)
    f = compiled(torch.sin, engine, precision="bf16", verify="compile")
    assert torch.equal(f(x), x.sin())
    (attempt,) = last().attempts
    assert (attempt.reason, attempt.engine["precision"]) == ("numeric_mismatch", "bf16")
    assert (attempt.precision, attempt.who) == ("fp32", "LowByOption")
    assert attempt.options == {"precision": "bf16"}
