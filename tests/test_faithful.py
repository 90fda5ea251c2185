"""Where an ONNX translation or a kernel means something else than torch: right or declined.

Every case was wrong, crashed, or raised once (torch 2.13, onnxscript 0.7, onnxruntime 1.31).
``TAKEN`` must run on ONNX Runtime; ``DECLINED`` must not, and a case there that ONNX Runtime would
get right by now is caught by ``test_rules_are_still_needed``.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from conftest import compiled, last

from composer.lowering import onnx

pytestmark = pytest.mark.slow

NAN, INF = math.nan, math.inf
T = torch.tensor


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def masked(q, k, m):
    return F.scaled_dot_product_attention(q, k, k, m).contiguous()


def bools(x):
    y = x > 0
    return y, y[1:], y.t()


MASK = T([[True, False, True], [False] * 3])
BIG = T([3_000_000_000, 3, -5, 2**40, -(2**40)] * 4)

TAKEN = {
    "a row masked everywhere": (masked, r(1, 1, 2, 4), r(1, 1, 3, 4), MASK),
    "a float mask": (
        *(masked, r(2, 2, 2, 4), r(2, 2, 3, 4)),
        torch.zeros(2, 1, 2, 3).masked_fill(~MASK, -INF),
    ),
    "maximum of large integers": (torch.maximum, BIG, BIG.flip(0)),
    "minimum of large integers": (torch.minimum, BIG, BIG.flip(0)),
    "clamp of large integers": (lambda a: a.clamp(min=0), BIG),
    "clamp between": (lambda a: a.clamp(-7, 2**35), BIG),
    "relu of large integers": (torch.relu, BIG),
    "a literal": (lambda a: a + torch.tensor([1.0, 2.0]), torch.zeros(2)),
    "a list as index": (lambda a: a[[0, 2]], r(3, 2)),
    "where with a literal": (lambda a: torch.where(a > 0, a, torch.tensor(0.0)), r(5)),
    "float64 with exact scalars": (lambda x: x * 0.5 + 1, r(5).double()),
    "views of booleans": (bools, r(3, 3)),
    "strides of booleans": (lambda x: (x > 0).t(), r(2, 3)),
    "channels last booleans": (
        lambda x: x > 0,
        r(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ),
    "an expanded result": (lambda x: (x + 1).expand(4, 3, 3), r(3, 3)),
    "clamp with float bounds": (lambda x: x.clamp(-0.5, 0.5), r(9)),
}

DECLINED = {
    "embedding bag": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="mean"),
        *(r(10, 5), T([5, 1, 6, 5, 6]), T([0, 3])),
    ),
    "maximum of all large integers": (lambda a: a.max(), T([3_000_000_000] + [3] * 15)),
    "product that wraps": (lambda a: a.prod(1), torch.full((3, 3), 2**22)),
    "integer power": (lambda a: 3**a, T([-1, 0, 5, 60])),
    "float64 with an inexact slope": (lambda x: F.leaky_relu(x, 0.1), r(9).double()),
    "float64 hardswish": (F.hardswish, r(9).double()),
    "pool with a divisor": (lambda x: F.avg_pool2d(x, 3, 2, divisor_override=2), r(1, 2, 8, 8)),
    "antialiased resize": (
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
        r(1, 2, 9, 9),
    ),
    "scattered mean": (
        lambda x, i, s: x.scatter_reduce(0, i, s, "mean"),
        *(r(5, 3), T([[0, 1, 2], [0, 4, 2], [1, 1, 1], [0, 0, 3]]), r(4, 3)),
    ),
    "product of nothing": (
        lambda b, x, y: torch.addmm(b, x, y, alpha=0.6, beta=0.2),
        *(r(10), r(5, 0), r(0, 10)),
    ),
    "mean of nothing": (lambda x: x.mean(0), torch.ones(0, 3)),
    "a norm that keeps dimensions": (
        lambda x: torch.linalg.vector_norm(x, keepdim=True),
        r(5, 3),
    ),
    "a fractional range": (lambda: torch.arange(0.1, -7.9, -4.0),),
    "log of the normal distribution": (torch.special.log_ndtr, T([-8.0, -20.0])),
    "log of a sum of exponentials": (torch.logaddexp, T([1000.0]), T([999.0])),
    "angle of a negative number": (torch.atan2, T([0.0]), T([-1.0])),
    "half precision scatter": (
        lambda x, i, s: x.scatter_add(0, i, s),
        *(r(4).half(), T([0, 1]), r(2).half()),
    ),
    "scatter of one number": (lambda x, i, s: x.scatter(0, i, s), r(1)[0], T(0), r(1)[0]),
    "negative padding": (lambda x: F.pad(x, (-4, 5, 0, 0), mode="replicate"), r(1, 1, 4, 4)),
    "gather nothing": (lambda x, i: x.gather(0, i), r(5), torch.zeros(2, 0, dtype=torch.int64)),
}


def same_as_eager(function, *args) -> None:
    with torch.no_grad():
        whole = compiled(function, "onnxrt", min_coverage=1.0)
        result, expected = whole(*args), function(*args)
    double = isinstance(expected, torch.Tensor) and expected.dtype is torch.float64
    tolerance = {"rtol": 1e-14, "atol": 0.0} if double else {}
    torch.testing.assert_close(result, expected, equal_nan=True, check_stride=True, **tolerance)


@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN)
def test_taken_and_right(case) -> None:
    """Values, dtypes, shapes and strides, on ONNX Runtime."""
    same_as_eager(*case)
    assert last().chosen == "onnxrt", last().attempts[0].message


@pytest.mark.parametrize("case", DECLINED.values(), ids=DECLINED)
def test_not_taken_and_right(case) -> None:
    """Somebody else answers."""
    same_as_eager(*case)
    assert last().chosen == "eager"


CRASHES = {"embedding bag"}
SEEN_BY_RUNNING = {
    *("a norm that keeps dimensions", "half precision scatter", "scatter of one number"),
    *("negative padding", "gather nothing"),
}


@pytest.mark.parametrize("name", sorted(DECLINED.keys() - CRASHES - SEEN_BY_RUNNING))
def test_rules_are_still_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its rule the case gives other results, or is not taken either."""
    monkeypatch.setattr(onnx, "unfaithful", lambda node: None)
    try:
        same_as_eager(*DECLINED[name])
    except AssertionError:
        return
    assert last().chosen == "eager", f"the rule for {name!r} can go"


def test_integer_division_by_zero_does_not_end_the_process() -> None:
    """ONNX Runtime's kernel would; eager raises."""
    f = compiled(lambda a, b: torch.div(a, b, rounding_mode="floor"), "onnxrt")
    with torch.no_grad(), pytest.raises(RuntimeError, match="ZeroDivision"):
        f(T([1, 2]), T([1, 0]))
    assert last().chosen == "eager"


def test_a_dynamic_dimension_is_not_squeezed_for_good() -> None:
    """Squeezing a size that is not one is a no-op in torch, an error in ONNX."""
    f = compiled(lambda x: x.squeeze(1).relu(), "onnxrt", dynamic=True)
    with torch.no_grad():
        for size in (4, 6):
            assert f(r(3, size, 5)).shape == (3, size, 5)


def test_what_only_shows_at_run_time_shows_while_compiling(monkeypatch) -> None:
    """A session that fails on the first inputs is a failed attempt, not the user's error."""
    from composer.backends import onnxrt

    monkeypatch.setattr(onnxrt.OnnxRuntimeEngine, "__call__", lambda self, *args: 1 / 0)
    same_as_eager(torch.sin, r(3))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("failed", "build_failed")
    assert attempt.error_type == "ZeroDivisionError"
