"""What OpenVINO makes one kernel of, and makes wrongly: kept from it, and right."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, last, upstream

from composer import _torch
from composer.backends.openvino import compiled as compiling
from composer.backends.openvino import corrections
from composer.backends.openvino.corrections import rotations
from composer.backends.openvino.snippets import SEPARATE
from composer.errors import FallbackWarning

pytest.importorskip("openvino", reason="the engine itself")
pytestmark = pytest.mark.slow

NAME = "openvino"
WIDE = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="seen with AVX-512 only"
)
"""What is wrong without the rule need not be on other processors."""


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def check(function, *args, **options):
    """As eager, of which the engine has all."""
    torch.testing.assert_close(compiled(function, NAME, **options)(*args), function(*args))
    attempt = last().attempts[0]
    assert (last().chosen, attempt.coverage) == (NAME, 1.0), attempt.message


SEQUENCE = """
import sys, composer, torch
from composer.backends.openvino import snippets
if "unguarded" in sys.argv:
    snippets._breaks = lambda node: False
first, second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
behind = {
    "difference": lambda x, y: x - y,
    "quotient": lambda x, y: x / y,
}
run = torch.compile(
    lambda x, y: behind[sys.argv[1]](second(first(x).relu()), y),
    backend="composer",
    options={"chain": ["openvino"], "verify": "compile"},
)
with torch.no_grad():
    run(torch.randn(3, 8), torch.rand(3, 4) + 1)
sys.exit(any(each.chosen != "openvino" for each in composer.reports()))
"""


@pytest.mark.parametrize("behind", ["difference", "quotient"])
def test_operations_behind_two_products_are_compiled_by_themselves(run_python, behind: str) -> None:
    """In one kernel with them OpenVINO (2026.4) ends the process; the rule may go if not."""
    done = run_python(SEQUENCE, behind)
    assert done.returncode == 0, done.stderr
    assert run_python(SEQUENCE, behind, "unguarded").returncode < 0


def test_an_activation_without_a_kernel_in_a_sequence_is_taken() -> None:
    """OpenVINO (2026.4) compiles no sequence of products with ``Mish`` in it."""
    layers = torch.nn.Linear(8, 16), torch.nn.Mish(), torch.nn.Linear(16, 4)
    check(torch.nn.Sequential(*layers).eval(), torch.randn(3, 8))


HEADS = 8


def attention(q, k, v):
    """By hand, of queries that are transposed and scaled; ``(batch, heads, places, width)``."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return torch.softmax((q * 0.25) @ k.transpose(-1, -2), dim=-1) @ v


def merged(q, k, v):
    """With the heads side by side again."""
    return attention(q, k, v).transpose(1, 2).flatten(-2)


def fused(q, k, v):
    """By torch's own operator."""
    q, k, v = (torch.sin(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("function", [attention, merged, fused])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_queries_as_many_as_heads_are_not_written_over(function, dynamic, precision) -> None:
    """The result is as large as they are, and lies otherwise."""
    q, *others = (torch.randn(2, places, HEADS * 16) for places in (HEADS, 24, 24))
    run = compiled(function, NAME, dynamic=dynamic, precision=precision)
    error = (run(q, *others) - function(q, *others)).abs().max()
    assert error < (1e-5 if precision == "fp32" else 0.05)
    assert last().chosen == NAME


class Packed(torch.nn.Module):
    """As in timm's vision transformers: one layer for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(HEADS * 16, 3 * HEADS * 16)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, HEADS, 16)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        return (((q @ k.mT) * 0.25).softmax(-1) @ v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_queries_as_many_as_heads_are_not_written_over(dynamic, precision) -> None:
    """Only the result is transposed within the kernel."""
    model, x = Packed(), torch.randn(2, HEADS, HEADS * 16)
    run = compiled(model, NAME, dynamic=dynamic, precision=precision)
    assert (run(x) - model(x)).abs().max() < (1e-5 if precision == "fp32" else 0.05)
    assert last().chosen == NAME


def attended(q, k, v):
    """With the heads apart, as in :func:`attention`, and a bias of the scores, as in T5."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    places = torch.arange(k.shape[2]) * 0.1
    return (q @ k.transpose(-1, -2) + places).softmax(-1) @ v


def joined(rows):
    """The heads side by side."""
    return rows.transpose(1, 2).flatten(-2)


def by_hand(q, k, v):
    """With the heads apart, and a softmax that is written out."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2) * 0.1).exp()
    return scores / scores.sum(-1, keepdim=True) @ v


class Attended(torch.nn.Module):
    """Attention as in T5, whose result goes through ``behind`` and then through a layer."""

    def __init__(self, behind):
        super().__init__()
        self.behind = behind
        self.inward = torch.nn.Linear(HEADS * 16, HEADS * 16, bias=False)
        self.outward = torch.nn.Linear(HEADS * 16, HEADS * 16, bias=False)

    def forward(self, q, k, v):
        return self.outward(self.behind(attended(self.inward(q), k, v)))


SWAPPED = {
    "both": Attended(joined),
    "both, as results": lambda q, k, v: joined(attended(q.sin(), k, v)),
}
NOT_SURELY = {
    "a result that is scaled": Attended(lambda rows: joined(rows) * 0.5),
    "a result before an activation": Attended(lambda rows: joined(rows).relu()),
    "a result that is turned again": Attended(
        lambda rows: rows.transpose(1, 2).transpose(2, 3).flatten(-2)
    ),
    "a result in another order": Attended(lambda rows: rows.permute(2, 0, 1, 3).flatten(-2)),
    "queries for each element": lambda q, k, v: joined(
        (
            q.sin().unflatten(-1, (HEADS, -1)).transpose(1, 2)
            * torch.linspace(0.5, 1, 16)
            @ k.unflatten(-1, (HEADS, -1)).permute(0, 2, 3, 1)
        ).softmax(-1)
        @ v.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    ),
    "a softmax by hand": by_hand,
}


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What the rule sets for each model that is compiled meanwhile."""
    found = []
    rule = compiling.config_for

    def spy(read, *, in_float32):
        found.append(rule(read, in_float32=in_float32))
        return found[-1]

    monkeypatch.setattr(compiling, "config_for", spy)
    return found


@pytest.mark.parametrize("places", [HEADS, 24])
@pytest.mark.parametrize("function", SWAPPED.values(), ids=SWAPPED)
def test_queries_and_a_result_that_are_both_transposed_cost_no_kernel(
    function, places: int, properties
) -> None:
    """In float32 the kernel takes in both transposes, so that the result lies as the queries do."""
    q, *others = (torch.randn(2, each, HEADS * 16) for each in (HEADS, places, places))
    check(function, q, *others, precision="fp32")
    assert properties == [{}]


@pytest.mark.parametrize("function", NOT_SURELY.values(), ids=NOT_SURELY)
def test_one_transpose_of_queries_or_a_result_costs_the_kernel(function, properties) -> None:
    """It does where it is not sure that the kernel takes in the other one, too."""
    check(function, *torch.randn(3, 2, HEADS, HEADS * 16), precision="fp32")
    assert SEPARATE in properties


def test_other_numbers_of_queries_cost_no_kernel(properties) -> None:
    """The result is not as large as the transposed queries, so it has memory of its own."""
    check(Packed(), torch.randn(2, HEADS + 1, HEADS * 16), precision="fp32")
    assert properties == [{}]


def test_both_transposes_cost_the_kernel_in_bfloat16(properties) -> None:
    """It takes in that of the queries only."""
    given = torch.randn(3, 2, HEADS, HEADS * 16)
    run = compiled(SWAPPED["both"], NAME, precision="bf16")
    assert (run(*given) - SWAPPED["both"](*given)).abs().max() < 0.05
    assert properties == [SEPARATE]


@upstream
@WIDE
def test_openvino_writes_over_packed_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(compiling, "config_for", lambda read, in_float32: {})
    model, x = Packed(), torch.randn(2, HEADS, HEADS * 16)
    assert (compiled(model, NAME, verify="off")(x) - model(x)).abs().max() > 0.01


@upstream
@WIDE
@pytest.mark.parametrize(("function", "precision"), [(attention, "fp32"), (merged, "bf16")])
def test_openvino_writes_over_them(function, precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    if precision == "bf16" and not _torch.processor.multiplies_bf16():
        pytest.skip("computed in float32 here")
    monkeypatch.setattr(compiling, "config_for", lambda read, in_float32: {})
    q, *others = (torch.randn(2, places, HEADS * 16) for places in (HEADS, 24, 24))
    found = compiled(function, NAME, precision=precision)(q, *others)
    assert (found - function(q, *others)).abs().max() > 0.1


NORMALIZED = """
import sys, composer, torch, torch.nn.functional as F
from composer.backends.openvino import snippets
if "unguarded" in sys.argv:
    snippets._is_normalized = lambda node: False
def attend(q, k, v):
    q = torch.tanh(q)
    if "written out" in sys.argv:
        return torch.softmax(q @ k.mT, -1) @ v + q
    return F.scaled_dot_product_attention(q, k, v) * q
def program(q, k, v):
    found = attend(q, k, v)
    return F.layer_norm(found, (8,)) if "norm" in sys.argv else found / found.sum(-1, keepdim=True)
options = {"chain": ["openvino"], "verify": "compile"}
with torch.no_grad():
    torch.compile(program, backend="composer", options=options)(*torch.rand(3, 2, 4, 3, 8))
sys.exit(any(each.chosen != "openvino" for each in composer.reports()))
"""


@pytest.mark.parametrize("attend", ["written out", "torch's"])
@pytest.mark.parametrize("behind", ["norm", "share"])
def test_attention_combined_and_normalized_compiles(run_python, attend: str, behind: str) -> None:
    """In one kernel OpenVINO (2026.4) ends the process."""
    done = run_python(NORMALIZED, attend, behind)
    assert done.returncode == 0, done.stderr


@upstream
@WIDE
def test_openvino_crashes_on_normalized_attention(run_python) -> None:
    """The rule may go if not."""
    assert run_python(NORMALIZED, "written out", "norm", "unguarded").returncode < 0


ATTRACTED = """
import sys, torch, composer
from composer.backends.openvino import compiled

def attracted(a, c):
    delta = torch.zeros_like(c)
    for i in range(a.shape[1]):
        d = a[:, i].unsqueeze(1) - c
        delta += d.div(1 + 300 * d.pow(2))
    return c + delta

if sys.argv[1] == "together":
    compiled.SEPARATE = {"INFERENCE_NUM_THREADS": "1"}
args = torch.rand(1, 48, 8, 8), torch.rand(1, 16, 8, 8)
with torch.no_grad():
    result = torch.compile(
        attracted, backend="composer", options={"chain": ["openvino"]}
    )(*args)
torch.testing.assert_close(result, attracted(*args))
print(composer.reports()[-1].attempts[0].sentence())
"""
"""As ZoeDepth moves the centers of its bins: more operations in one kernel than registers."""

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Has OpenVINO take a processor with AVX-512 for one without, which has half as many registers."""


@pytest.mark.skipif("x86" not in platform.machine(), reason="not here: no x86 processor")
@pytest.mark.parametrize(
    ("how", "said"),
    [("apart", "openvino succeeded"), ("together", "not enough registers")],
)
def test_operations_for_which_no_kernel_is_made_are_compiled_by_themselves(
    how: str, said: str, run_python
) -> None:
    """OpenVINO (2026.4) refuses the model with them together. The rule may go when it does not."""
    done = run_python(ATTRACTED, how, env=AVX2)
    assert said in done.stdout, done.stderr


def rotated(x):
    """The second half of each row, negated, before the first."""
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


TURNED = {
    "numbers": lambda x: x * 0.8 + rotated(x) * 0.6,
    "a difference": lambda x: x * 0.8 - rotated(x) * 0.6,
    "quotients": lambda x: x / 0.8 + rotated(x) / 0.6,
    "alpha": lambda x: torch.add(x * torch.ones(x.shape[-1]), rotated(x), alpha=0.6),
    "several factors": lambda x: x * 0.8 + rotated(x) * 0.5 * 0.6,
    "one for each row": lambda x: x * x.mean(-1, True) + rotated(x) * x.sum(-1, True),
    "one for each head": lambda x: x * x.mean((2, 3), True) + rotated(x) * x.sum((2, 3), True),
    "part of a row": lambda x: torch.cat([x[..., :4] * 2 + rotated(x[..., :4]) * 3, x], -1),
    "one for each element": lambda x: x * x.mean(0, True) + rotated(x) * x.sum(0, True),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("turned", TURNED.values(), ids=TURNED)
def test_rotations_by_one_factor_for_a_row(turned, dynamic) -> None:
    """No kernel reads as many factors as a row is long."""
    check(turned, torch.randn(2, 4, 6, 8), dynamic=dynamic)


ROTATED = """
import sys, composer, torch
from composer.backends.openvino import corrections
corrections.ALWAYS = ()
turned = lambda x: x * 0.8 + torch.cat([-x[..., 4:], x[..., :4]], dim=-1) * 0.6
run = torch.compile(turned, backend="composer", options={"chain": ["openvino"]})
with torch.no_grad():
    x = torch.randn(2, 4, 6, 8)
    torch.testing.assert_close(run(x), turned(x))
"""


@upstream
@WIDE
def test_openvino_reads_past_a_single_factor(run_python) -> None:
    """It takes what it finds there for factors (2026.4); widening may go when it does not."""
    assert run_python(ROTATED).returncode != 0


def turned_by(parts):
    """``x * a + cat(-first, second) * b``, where ``parts`` gives the two."""

    def turn(x, a, b):
        first, second = parts(x)
        return x * a + torch.cat([-first, second], dim=-1) * b

    return turn


NOT_HALVES = {
    "a part that is no half": turned_by(lambda x: (x[..., 2:], x[..., :2])),
    "uneven pieces": turned_by(lambda x: x.split([3, 5], dim=-1)[::-1]),
    "halves as they are": turned_by(lambda x: (x[..., :4], x[..., 4:])),
    "a negated part behind it": lambda x, a, b: (
        x * a + torch.cat([x[..., :2], -x[..., 2:]], dim=-1) * b
    ),
    "a part from the end": turned_by(lambda x: (x[..., -2:], x[..., :-2])),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("turned", NOT_HALVES.values(), ids=NOT_HALVES)
def test_what_does_not_swap_halves_is_no_rotation(turned, dynamic) -> None:
    """Each row is computed with the parts that the program says."""
    check(turned, torch.randn(2, 4, 6, 8), *torch.randn(2, 1, 1, 6, 8), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_rotary_embedding_stays_one(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO loses how wide a row is where heads of dynamic sizes are made; its parts tell."""
    turn = turned_by(lambda x: (x[..., 4:], x[..., :4]))

    def heads(x):
        angles = torch.arange(8) / 8
        return turn(x.view(*x.shape[:2], -1, 8).transpose(1, 2), angles.cos(), angles.sin())

    monkeypatch.setattr(rotations, "_disguise", None)
    check(heads, torch.randn(2, 6, 32), dynamic=dynamic)


@upstream
@pytest.mark.parametrize("name", ["a part that is no half", "halves as they are"])
def test_openvino_takes_it_for_a_rotation(name, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    given = torch.randn(2, 4, 6, 8), *torch.randn(2, 1, 1, 6, 8)
    found = compiled(NOT_HALVES[name], NAME)(*given)
    assert (found - NOT_HALVES[name](*given)).abs().max() > 0.1


class Slopes(torch.nn.Module):
    """A leaky rectifier, whose slope is made by the program or a weight of it."""

    def __init__(self, rectified, slope):
        super().__init__()
        self.rectified = rectified
        self.register_buffer("slope", slope)

    def forward(self, x):
        slope = torch.arange(8.0) if self.slope is None else self.slope
        return self.rectified(x, slope)


LEAKY = {
    "difference": lambda x, slope: F.relu(x) - F.relu(-x) * slope,
    "product": lambda x, slope: F.relu(x) + F.relu(x * -1.0) * -slope,
    "magnitude": lambda x, slope: F.relu(x) + (x - x.abs()) * slope * 0.5,
}


@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("slope", [None, torch.arange(8.0)], ids=["made", "weight"])
@pytest.mark.parametrize("leaky", LEAKY.values(), ids=LEAKY)
def test_slopes_lie_along_the_last_dimension(leaky, slope, channels) -> None:
    """Not along the channels, whether there are as many or not."""
    check(Slopes(leaky, slope).eval(), torch.randn(2, channels, 6, 8))


@upstream
def test_openvino_takes_slopes_along_the_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    x = torch.randn(2, 8, 6, 8)
    leaky = Slopes(LEAKY["difference"], None)
    assert (compiled(leaky, NAME)(x) - leaky(x)).abs().max() > 0.1


class Channels(torch.nn.Module):
    """A linear layer without a bias, and what reads a number for each index of dimension 1."""

    def __init__(self, behind, sizes: tuple[int, ...], rectify: bool = False) -> None:
        super().__init__()
        self.behind, self.rectify = behind, rectify
        self.linear = torch.nn.Linear(6, 8, bias=False)
        channels = torch.randn(sizes[0], *(1 for _ in sizes))
        self.channels = torch.nn.Parameter(channels)

    def forward(self, x):
        y = self.linear(x)
        return self.behind(F.relu(y) if self.rectify else y, self.channels)


BEHIND = {
    "sum": lambda y, b: y + b,
    "difference": lambda y, b: b - y,
    "product": lambda y, b: F.gelu(y) * b,
    "quotient": lambda y, b: y.tanh() / (b.abs() + 1),
    "softmax": lambda y, b: (y + b).softmax(-1),
    "slopes": lambda y, b: F.prelu(y, b.flatten()),
    "rectified": lambda y, b: F.relu(y) - F.relu(-y) * b,
    "square": lambda y, b: (y - b) ** 2,
    "norm": lambda y, b: F.batch_norm(
        F.relu(y), b.flatten(), b.flatten().abs() + 1, b.flatten(), b.flatten()
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("rectify", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("sizes", [(8, 5), (5, 8), (8, 3, 5)], ids=str)
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_channels_behind_a_layer_are_dimension_1(behind, sizes, rectify, dynamic) -> None:
    """Not the layer's own outputs, whether there are as many or not."""
    model, x = Channels(behind, sizes, rectify).eval(), torch.randn(2, *sizes, 6)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    check(model, x)


def test_channels_are_found_in_deep_models() -> None:
    """Constants are told from what is computed without following each value to its beginning."""

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Conv2d(2, 2, 1) for _ in range(250))
            self.head = torch.nn.Linear(2, 4, bias=False)

        def forward(self, x):
            for block in self.blocks:
                x = F.silu(block(x)) + x * 0.1
            return self.head(x.permute(0, 2, 3, 1))

    check(Deep().eval(), torch.randn(1, 2, 4, 4))


def test_one_output_for_all_channels_is_left_alone() -> None:
    """Its dimension may be repeated to one that varies."""

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 1, bias=False)
            self.channels = torch.nn.Parameter(torch.randn(5, 1, 1))

        def forward(self, x, z):
            return self.linear(x) * z * self.channels

    z = torch.randn(2, 5, 7, 9)
    torch._dynamo.mark_dynamic(z, 3)
    check(One().eval(), torch.randn(2, 5, 7, 6), z)


@upstream
@pytest.mark.parametrize(
    ("behind", "dynamic"), [("slopes", False), ("rectified", False), ("sum", True), ("norm", True)]
)
def test_openvino_takes_channels_for_a_layers_outputs(
    behind: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    model, x = Channels(BEHIND[behind], (8, 5)).eval(), torch.randn(2, 8, 5, 6)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    assert not torch.allclose(compiled(model, NAME)(x), model(x), atol=0.1)


ALMOST_GELU = {
    "erf of a quotient": lambda x: 0.5 * x * (1 + torch.erf(x / 1.415)),
    "erf of a product": lambda x: 0.5 * x * (1 + torch.erf(x * 0.7065)),
    "tanh": lambda x: 0.5 * x * (1 + torch.tanh(0.79 * (x + 0.044715 * x.pow(3)))),
    "tanh of a product": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * x * (1 + 0.0447 * x * x))),
}


@pytest.mark.parametrize("function", ALMOST_GELU.values(), ids=ALMOST_GELU)
def test_what_is_almost_gelu_is_not_taken_for_it(function) -> None:
    """It is computed with its own constants."""
    check(function, -torch.rand(2, 4, 6, 8) * 2)


@upstream
@pytest.mark.parametrize("function", ALMOST_GELU.values(), ids=ALMOST_GELU)
def test_openvino_takes_it_for_gelu(function, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    x = -torch.rand(2, 4, 6, 8) * 2
    assert (compiled(function, NAME)(x) - function(x)).abs().max() > 1e-4


NOT_KEPT = {
    "difference": lambda x: x - x.mean(-1),
    "layer norm": lambda x: centered(x - x.mean(-1)),
    "of squares": lambda x: x / torch.sqrt(x.pow(2).mean(-1) + 0.5),
    "of products": lambda x: x * torch.rsqrt((x * x).mean(-1) + 0.5),
    "of columns": lambda x: x / torch.sqrt(x.pow(2).mean(0) + 0.5),
    "of images": lambda x: x.expand(8, 8, 8, 8) - x.expand(8, 8, 8, 8).mean((-1, -2)),
}


def centered(x):
    """By the root of its mean square."""
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 0.5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", NOT_KEPT.values(), ids=NOT_KEPT)
def test_means_without_their_dimension_lie_along_the_last(function, dynamic) -> None:
    """As anything with fewer dimensions does."""
    check(function, torch.randn(8, 8), dynamic=dynamic)


@upstream
@pytest.mark.parametrize("norm", ["layer norm", "of squares"])
def test_openvino_takes_them_for_those_that_keep_it(norm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    x = torch.randn(8, 8)
    assert (compiled(NOT_KEPT[norm], NAME)(x) - NOT_KEPT[norm](x)).abs().max() > 0.05


COUNTED_FROM_THE_LAST = {
    "behind the last": lambda x: x.relu().unsqueeze(-1).sum(-2),
    "before the last": lambda x: x.relu().unsqueeze(-2).sum(-3) + 1,
    "kept": lambda x: x.relu().unsqueeze(-1).sum(-2, keepdim=True),
    "a mean": lambda x: x.relu().unsqueeze(-1).mean(-2) * 2,
    "several": lambda x: x.relu().unsqueeze(-1).sum((-2, -3)),
    "another shape": lambda x: x.relu().reshape(*x.shape, 1).sum(-2),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", COUNTED_FROM_THE_LAST.values(), ids=COUNTED_FROM_THE_LAST)
def test_reduced_dimensions_are_counted_with_those_that_were_added(function, dynamic) -> None:
    """Also from the last one."""
    check(function, torch.randn(4, 6, 6), dynamic=dynamic)


@upstream
@pytest.mark.parametrize("name", ["behind the last", "a mean"])
def test_openvino_counts_without_them(name, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    x, function = torch.randn(4, 6, 6), COUNTED_FROM_THE_LAST[name]
    assert (compiled(function, NAME)(x) - function(x)).abs().max() > 0.1


TURNED_BY_PLACES_OF_ONE = {
    "a sum": lambda x, y: x.permute(1, 2, 0).sum(0) + y,
    "of images": lambda x, y: x.unsqueeze(1).permute(0, 2, 3, 1).sum(1) + y,
    "a truth": lambda x, y: (x.permute(1, 2, 0) > 0).any(0) & (y > 0),
    "a power": lambda x, y: x.permute(2, 0, 1).norm(p=3, dim=2) + y.mT,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", TURNED_BY_PLACES_OF_ONE.values(), ids=TURNED_BY_PLACES_OF_ONE)
def test_reductions_behind_a_turn_drop_their_own_dimension(function, dynamic) -> None:
    """Not the one of one place, of a batch of one."""
    check(function, torch.randn(1, 3, 8), torch.randn(8, 8), dynamic=dynamic)


@upstream
@pytest.mark.parametrize("name", ["a sum", "of images"])
def test_openvino_drops_another(name, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    given, function = (torch.randn(1, 3, 8), torch.randn(8, 8)), TURNED_BY_PLACES_OF_ONE[name]
    assert (compiled(function, NAME)(*given) - function(*given)).abs().max() > 0.1


def of_rank(rank: int) -> torch.Tensor:
    return torch.full((1,) * rank, 0.7)


MORE_DIMENSIONS = {
    "before a convolution": lambda x, one: F.conv1d(x * of_rank(3), torch.ones(2, 4, 1)),
    "of a rectifier": lambda x, one: x.relu() - of_rank(3) * (-x).relu(),
    "of a swish": lambda x, one: x * torch.sigmoid(x * of_rank(3)),
    "of a swish, computed": lambda x, one: x * torch.sigmoid(x * one.view(1, 1, 1)),
    "of a swish, a vector": lambda x, one: x * torch.sigmoid(x * one),
}


@pytest.mark.parametrize("function", MORE_DIMENSIONS.values(), ids=MORE_DIMENSIONS)
def test_factors_of_one_element_have_dimensions(function) -> None:
    """They may have more than what they multiply, and be computed."""
    check(function, torch.randn(4, 6), torch.ones(1))


@upstream
@pytest.mark.parametrize("function", MORE_DIMENSIONS.values(), ids=MORE_DIMENSIONS)
def test_openvino_takes_them_for_numbers(function, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the model then (2026.4); the rules may go when it does not."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    with pytest.warns(FallbackWarning):
        compiled(function, NAME)(torch.randn(4, 6), torch.ones(1))
    assert last().chosen != NAME


SIGNED = {
    "with its magnitude": lambda v: v * v.abs(),
    "beside it": lambda v: torch.stack([v, v.abs()]),
    "softsign": F.softsign,
    "of numbers": lambda v: (x := torch.stack([v.sum() - 9, v.mean()])) * x.abs(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", SIGNED.values(), ids=SIGNED)
def test_vectors_keep_their_signs(function, dynamic) -> None:
    """Also those of several parts, whose magnitude is read, too."""
    check(lambda x: function(torch.cat([x - 1, x + 1])), torch.randn(8), dynamic=dynamic)


@upstream
@pytest.mark.parametrize("function", SIGNED.values(), ids=SIGNED)
def test_openvino_takes_magnitudes_of_the_parts(function, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    program, x = lambda x: function(torch.cat([x - 1, x + 1])), torch.randn(8)
    assert (compiled(program, NAME)(x) - program(x)).abs().max() > 0.1


def value_of(layer):
    """As the critic of an actor and critic."""
    return lambda x: layer(x).reshape(())


CRITICS = {
    "a layer": value_of(torch.nn.Linear(7, 1)),
    "layers": value_of(torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 1))),
    "in between": lambda x: (x @ x.T).tanh().reshape(()),
    "behind": lambda x: (x @ x.T).reshape(()).tanh() + x,
    "in two steps": lambda x: (x @ x.T).view(1).view(()),
    "batches": lambda x: torch.bmm(x[None], x.T[None]).reshape(()),
    "einsum of matrices": lambda x: torch.einsum("bi,bi->", x, x.sin()),
    "einsum of vectors": lambda x: torch.einsum("i,i->", x[0], x[0].sin()),
    "einsum of both": lambda x: torch.einsum("ij,j->", x, x[0].sin()),
    "einsum of three": lambda x: torch.einsum("i,ij,j->", x[:, 0], x, x[0].sin()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("function", CRITICS.values(), ids=CRITICS)
def test_products_of_one_element_become_scalars(function, precision, dynamic) -> None:
    """In one kernel with the reshape OpenVINO (2026.4) ends the process."""
    x = torch.linspace(0.1, 0.7, 7)[None]
    run = compiled(function, NAME, dynamic=dynamic, precision=precision)
    tolerance = 1e-5 if precision == "fp32" else 0.05
    torch.testing.assert_close(run(x), function(x), rtol=tolerance, atol=tolerance)
    assert (last().chosen, last().attempts[0].coverage) == (NAME, 1.0)


CRITIC = """
import composer, torch
from composer.backends.openvino import corrections
corrections.ALWAYS = ()
options = {"chain": ["openvino"]}
run = torch.compile(lambda x: (x @ x.T).reshape(()), backend="composer", options=options)
with torch.no_grad():
    run(torch.ones(1, 7))
"""


@upstream
def test_openvino_crashes_behind_products_of_one_element(run_python) -> None:
    """The rule may go if not (2026.4 does)."""
    assert run_python(CRITIC).returncode < 0


class Windowed(torch.nn.Module):
    """A convolution of what is multiplied by a window as long as its kernel is wide."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv1d(3, 5, 4, padding=2)
        self.register_buffer("window", torch.rand(4))

    def forward(self, x):
        return self.convolution(x * self.window)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_window_stays_with_the_places(dynamic: bool) -> None:
    """The kernel is not weighted by it."""
    check(Windowed(), torch.randn(2, 3, 4), dynamic=dynamic)


@upstream
def test_openvino_moves_windows_into_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when it does not any more (2026.4 does)."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    model, x = Windowed(), torch.randn(2, 3, 4)
    assert (compiled(model, NAME, verify="off")(x) - model(x)).abs().max() > 0.05
