"""Where an ONNX translation or a kernel means something else than torch: right or declined.

Every case was wrong, crashed, or raised once (torch 2.13, onnxscript 0.7, onnxruntime 1.31).
``TAKEN`` must run on ONNX Runtime; ``DECLINED`` must not. When upstream mends a fault,
``test_rules_are_still_needed`` or ``test_entries_are_still_needed`` says what can go.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, fault_of, last, needs_torch, upstream
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from composer.backends import onnxrt
from composer.backends.onnxrt.operators import entries, sum_of_integers
from composer.lowering.export import onnx
from composer.lowering.loaded import BoundRegion
from composer.lowering.operators import operators
from composer.lowering.operators.entry import Operators
from composer.lowering.operators.translations import translator_with

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


def often_joined(x, w):
    s = torch.sigmoid(x)
    for _ in range(60):  # twice as many ways each time
        s = torch.cat([s[1:], s[:1]])
    return s @ w


SHORT = T([0, -1, 2, 2], dtype=torch.int32)
MASK = T([[True, False, True], [False] * 3])
ODD = T(
    [
        *(
            NAN,
            INF,
            -INF,
            -0.0,
            0.0,
            0.5,
            -0.5,
            1.0,
            -1.0,
            2.5,
            -2.5,
            -3.0,
            3e38,
            -3e38,
            1e-40,
            1e10,
        ),
        *(1e-9, -1e-9, 88.5, -100.0),
    ]
)
USUAL = torch.cat([ODD[:12], ODD[15:]])
"""Without what has no exact rest in eager's vectorized loops: the largest and the denormal."""
SPOILT = T([[1, 2, NAN, 0, NAN], [NAN, 1, 2, 3, INF], [-INF, NAN, 4, INF, 6], [1, 2, 3, 4, 5.0]])
IMAGES = r(2, 3, 9, 9)
IMAGES[0, 0, 2, 3] = IMAGES[0, 2, :5, :5] = NAN
IMAGES[1, 0, 0, 0] = INF
IMAGES[1, 0, 0, 1] = -INF
PLACES = T([[0, 1, 2], [0, 4, 2], [1, 1, 1], [0, 0, 3]])
PAIRS = (torch.logaddexp, torch.atan2, torch.copysign, torch.fmax, torch.fmin, torch.hypot)
SINGLES = (torch.log1p, torch.expm1, torch.lgamma, torch.digamma, torch.erfinv)
SINGLES += (torch.special.spherical_bessel_j0, torch.sign, torch.sgn, torch.signbit, torch.trunc)
BIG = T([3_000_000_000, 3, -5, 2**40, -(2**40)] * 4)

TAILS = T([-10.0, -15.0, -16.0, -18.0, -40.0])
MANY = torch.full((4_000_000,), 0.1)
TWICE = T([0, 0, 1])

LAST = r(2, 4, 3, 4).to(memory_format=torch.channels_last)

TAKEN = {
    "a range from a negative zero": (lambda x: torch.arange(-0.0, 3.0) * x, r(3)),
    "logarithms of sums of powers of two": (torch.logaddexp2, T([200.0, -INF]), T([200.0, -INF])),
    "signs of numbers": (lambda x: (torch.copysign(x, -0.0), torch.copysign(x, 2.0)), ODD),
    "float16 compared with a tenth": (
        lambda x: (x == 0.1, x != 0.1, x < 0.1, x <= 0.1, x > 0.1, x >= 0.1),
        T([0.1, 0.2, 0.3]).half(),
    ),
    "large integers within one bound": (lambda x: (x.clamp_min(2**33), x.clamp_max(2**33)), BIG),
    "extremes of large integers": (lambda x: (x.min(), *x.view(4, 5).max(1)), BIG),
    "scans, channels last": (lambda x: (x.cumprod(0), *x.cummax(0), *x.cummin(1)), LAST),
    "functions of two that lie otherwise": (
        lambda x, y: (torch.atan2(x, y), torch.copysign(x, y), x // y, y // x, torch.fmax(y, x)),
        *(r(4, 6).t(), r(6, 4)),
    ),
    "a logarithm of softmax in float64": (
        lambda x: (x.log_softmax(-1), x.log_softmax(0), x.t().log_softmax(1).view(-1)),
        T([[1, 2, NAN], [1, INF, 2], [-INF, -INF, -INF], [-1e300, 0, 1.0]], dtype=torch.float64),
    ),
    "a quotient and a rest of bytes by a negative number": (
        lambda x: (torch.div(x, -2, rounding_mode="trunc"), torch.fmod(x, -2), x // 3),
        T([0, 1, 5, 200, 255], dtype=torch.uint8),
    ),
    "what is added to rows, transposed": (
        lambda x, index: x.index_put((index,), x[:3], accumulate=True),
        *(r(6, 5, 4).permute(2, 1, 0), T([0, 0, 3])),
    ),
    "roots of float16": (
        lambda x: (x**0.5, x**-0.5),
        T([-INF, -0.0, 0.0, 2.0, 4.0, NAN, INF], dtype=torch.float16),
    ),
    "a product of integers with fractions for factors": (
        lambda x, a, b: torch.addmv(x, a, b, beta=0.2, alpha=1.6),
        *(torch.arange(5), torch.arange(15).view(5, 3), torch.arange(3)),
    ),
    "a sum of products of large integers": (
        lambda x, a: torch.addbmm(x, a, a) + torch.addbmm(x, a, a, beta=0, alpha=3),
        *(BIG.view(5, 4)[:4], BIG.repeat(2).view(2, 5, 4)[:, :4] * 2**20 + 1),
    ),
    "a logarithm of a sigmoid": (lambda x: torch.sigmoid(x).log(), TAILS),
    "a logarithm of a sigmoid in another shape": (
        lambda x: -1 / torch.where(x.view(-1, 1) < 0, torch.sigmoid(x.view(1, -1)).t(), 0.5),
        TAILS,
    ),
    "a logarithm of a sigmoid and a small number": (
        lambda x, mask: torch.log(torch.sigmoid(x) * mask + 1e-8),
        *(TAILS, T([1.0, 1.0, 0.5, 1.0, 1.0])),
    ),
    "a logarithm of what a gate lets through": (
        lambda x: torch.log(F.glu(torch.cat([x.abs(), x]), 0)),
        TAILS,
    ),
    "a mean of parts, channels last": (
        lambda x: (
            F.adaptive_avg_pool2d(x, (2, 3)),
            F.adaptive_avg_pool2d(x, (2, 3)).permute(0, 2, 3, 1).view(-1, 4) * 2,
            F.interpolate(x, size=(8, 9), mode="area").permute(0, 2, 3, 1).view(-1, 4),
            F.adaptive_avg_pool2d(x[:, :3], (2, 3)).permute(0, 2, 3, 1).view(-1, 3) * 2,
            F.adaptive_avg_pool2d(x[:, :, :1, :1], 2).permute(0, 2, 3, 1).view(-1, 4) * 2,
        ),
        r(2, 4, 5, 7).to(memory_format=torch.channels_last),
    ),
    "next to a pole": (
        lambda x: (torch.lgamma(x), torch.digamma(x)),
        T([-1e-9, -1e-13, -1e-17, -1e-38, 1e-38, 1e-17, -1.0000001, -1.9999999]),
    ),
    "a Bessel function of float64": (
        torch.special.spherical_bessel_j0,
        torch.linspace(-1, 1, 41).double(),
    ),
    "a logarithm of a product with a sigmoid": (
        lambda x, y: (
            (torch.sigmoid(x)[None] @ y.softmax(0)).log(),
            (torch.sigmoid(x) * ((y @ y.t()) * (y @ y.t())).diagonal()).log(),
            torch.sigmoid(x).sum() / torch.sigmoid(x),
        ),
        *(TAILS, r(5, 3)),
    ),
    "sigmoids of integers": (
        lambda x: (torch.sigmoid(x), torch.sigmoid(x.int()), torch.sigmoid(x > 0) * 2),
        T([-20, 3, 0, 5]),
    ),
    "a sigmoid that is often cut and joined": (often_joined, r(8, 4), r(4, 4)),
    "sigmoids": (lambda x: torch.sigmoid(x) * 1e9, TAILS),
    "sigmoids of float64": (lambda x: torch.sigmoid(x), TAILS.double()),
    "sigmoids of float64 as a factor": (lambda x: F.silu(x), TAILS.double()),
    "truths along no dimensions": (
        lambda x, n: (
            (x > 0).any(dim=()),
            x.all(dim=()),
            n.any(dim=()),
            n.all(dim=(0, 1)),
            n.any(0),
        ),
        *(torch.tensor([[NAN, 0.0], [-1.0, INF]]), torch.tensor([[0, 3]], dtype=torch.uint8)),
    ),
    "sums so far": (lambda x: x.cumsum(0), torch.full((100_000,), 0.1)),
    "sums so far of halves": (lambda x: x.cumsum(0), torch.full((1_000,), 0.1).half()),
    "elu with scales": (
        lambda x: (torch.ops.aten.elu(x, 2, 3, 4), F.selu(x), F.elu(x, 2)),
        ODD / 9,
    ),
    "celu of float64": (lambda x: F.celu(x, 2.0), T([3.0, -1.0, NAN, INF, -INF]).double()),
    "the largest of infinities alone": (
        *(lambda x, i, y: x.scatter_reduce(0, i, y, "amax", include_self=False), r(3), TWICE),
        T([-INF, -INF, 1.0]),
    ),
    "the smallest of infinities alone": (
        *(lambda x, i, y: x.index_reduce(0, i, y, "amin", include_self=False), r(3), TWICE),
        T([INF, INF, NAN]),
    ),
    "bounds without dimensions": (
        *(lambda x, t: (x.clamp_min(t), x.clamp_max(t), x.clamp(t - 1, t + 1)), ODD, T(0.0)),
    ),
    "a bound that is NaN": (
        *(lambda x, t: (x.clamp_min(t), x.clamp_max(t), x.clamp(max=t, min=t)), ODD, T(NAN)),
    ),
    "a bound that is NaN, as a number": pytest.param(
        (lambda x: (x.clamp(min=NAN), x.clamp(max=NAN), x.clamp(NAN, 1.0)), ODD),
        marks=needs_torch("2.12", "such a bound is none"),
    ),
    "logits of NaN between bounds": (lambda x: torch.logit(x, eps=1e-6), T([NAN, 0.5, 2.0, -1.0])),
    "angles": (lambda x: torch.angle(x), T([NAN, -1.0, 1.0, INF, -INF, 0.0])),
    "angles of float64": (lambda x: torch.angle(x), T([NAN, -1.0, 1.0, INF, -INF, 0.0]).double()),
    "a sum of many": (lambda x: (x.sum(), x.mean(), x.view(-1, 4).sum(0)), MANY),
    "an error of many": (lambda x: (F.mse_loss(x, x * 2), F.l1_loss(x, x * 2)), MANY),
    "a variance of many": (lambda x: (x.var(), x.std(), *torch.var_mean(x, 0)), r(300_001)),
    "a variance of few": (lambda x: (x.var(correction=3), x.std(correction=3)), T([1.0, 2.0])),
    "a norm over many pictures": (
        *(lambda x: F.batch_norm(x, None, None, training=True), r(32, 3, 64, 64) + 10),
    ),
    "exact logarithms": (
        lambda x, y: (torch.log2(x).floor(), torch.log10(y).floor()),
        *(2.0 ** torch.arange(1, 127), 10.0 ** torch.arange(1, 38)),
    ),
    "integers between": (
        lambda x: x + torch.linspace(0, 14, 51, dtype=torch.int64),
        torch.zeros(51, dtype=torch.int64),
    ),
    "a range beyond what float32 counts": (
        *(lambda x: x + torch.arange(2**24, 2**24 + 8, 1, dtype=torch.int32), T([0] * 8).int()),
    ),
    "a window of one": (
        lambda x: x * torch.hann_window(1) * torch.blackman_window(1),
        torch.ones(1),
    ),
    "a copy of fewer numbers": (lambda x, y: x.sin().copy_(y) * 2, r(3, 4), r(4)),
    "indices of 32 bits": (lambda x, i: x[:, i] + x[i.long(), i], r(4, 4), SHORT),
    "elements added at indices of 32 bits": (
        *(lambda x, i, y: x.index_put((i,), y, accumulate=True), r(4, 2), SHORT, r(4, 2)),
    ),
    "the first true one": (lambda x: (x > 0).max(1), r(4, 5)),
    "a row masked everywhere": (masked, r(1, 1, 2, 4), r(1, 1, 3, 4), MASK),
    "a float mask": (
        *(masked, r(2, 2, 2, 4), r(2, 2, 3, 4)),
        torch.zeros(2, 1, 2, 3).masked_fill(~MASK, -INF),
    ),
    "a quotient of numbers": (lambda x: x * torch.div(7, 2), r(4)),
    "a rounded quotient of numbers": (
        lambda x: x + torch.div(16.5, 4, rounding_mode="trunc"),
        r(4),
    ),
    "a number rounded down": (lambda x: x + torch.div(-7, 2, rounding_mode="floor"), r(4)),
    "a float less integers": (lambda m: (1.0 - m) * -1e4, T([[1, 1, 0], [1, 0, 0]])),
    "a float less multiples of integers": (
        lambda m: torch.rsub(m, 0.5, alpha=3) + m,
        T([3, -4, 0], dtype=torch.int32),
    ),
    "a transposed matrix with a vector": (lambda a, x: torch.mv(a.T, x), r(4, 4), r(4)),
    "a long transposed matrix with a vector": (lambda a, x: a.T @ x, r(3, 5), r(3)),
    "a vector, and a transposed matrix with one": (
        *(lambda a, x: torch.addmv(x, a.mT, x), r(4, 4), r(4)),
    ),
    "a vector with a transposed matrix": (lambda a, x: x @ a.T, r(3, 5), r(5)),
    "transposed matrices with a vector": (lambda a, x: a.mT @ x, r(2, 3, 5), r(3)),
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
    "half precision and numbers that it holds": (
        lambda x: (x + 1e-8) * 6e4 / 1e3 - 1e-9,
        r(5).half() / 9,
    ),
    "float64 times a tenth": (lambda x: x * 0.1 - 0.3, r(9).double()),
    "a fractional range": (lambda: torch.arange(0.1, -7.9, -4.0),),
    "a part of a range": (lambda x: (y := torch.arange(0.5, 9), y[1:], x + y), r(9)),
    "a window": (lambda x: x * torch.signal.windows.kaiser(10, beta=2.0), r(10)),
    "float64 with the slope of a hundredth": (F.leaky_relu, T([-3.0, -0.0, 0.0, 2.0]).double()),
    "float64 celu": (F.celu, r(9).double()),
    "float64 degrees": (torch.deg2rad, r(9).double()),
    "float64 radians": (torch.rad2deg, r(9).double()),
    "a window in float64": (lambda: torch.signal.windows.hann(10, dtype=torch.float64),),
    "products to which nothing is added": (
        lambda x, a: (
            torch.addmm(x, a, a, beta=0),
            torch.addmv(x[0], a, a[0], beta=0, alpha=2),
            torch.baddbmm(x[None], a[None], a[None], beta=0, alpha=0.5),
            torch.addbmm(x, a.expand(2, 3, 3), a.expand(2, 3, 3), beta=0.0),
            torch.addmm(x, a[:, :0], a[:0], beta=0),
        ),
        *(torch.full((3, 3), NAN), r(3, 3)),
    ),
    "mean of nothing": (lambda x: x.mean(0), torch.ones(0, 3)),
    "moments of nothing": (lambda x: (x.mean(), x.sum() + 1, x.sort()), torch.ones(0)),
    "determinant of nothing": (torch.linalg.slogdet, torch.ones(0, 0)),
    "normalized nothing": (lambda x, w: F.layer_norm(x, (3,), w, w), torch.ones(0, 3), r(3)),
    "gather nothing": (lambda x, i: x.gather(0, i), r(5), torch.zeros(2, 0, dtype=torch.int64)),
    "nothing put together": (lambda x: torch.cat([x, x]) + 1, r(0)),
    "product of nothing": (
        lambda b, x, y: torch.addmm(b, x, y, alpha=0.6, beta=0.2),
        *(r(10), r(5, 0), r(0, 10)),
    ),
    "a part of a result": (lambda x: ((x + 1)[:, :2], (x > 0)[::2].t()), r(4, 5)),
    "a norm that keeps dimensions": (
        lambda x: torch.linalg.vector_norm(x, keepdim=True),
        r(5, 3),
    ),
    "the largest of all": (lambda x: (x.amax(), torch.aminmax(x)), r(4, 5)),
    "the largest of large integers": (
        lambda a: (a.max(), a.min(0), a.amax((0, 1)), a.amin(1, keepdim=True)),
        BIG.reshape(4, 5),
    ),
    "pool with a divisor": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=2, count_include_pad=False),
        r(1, 2, 8, 8),
    ),
    "pool with a divisor whose last windows reach further": (
        lambda x: (
            F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=5),
            F.avg_pool3d(x[None], (1, 3, 2), 2, (0, 1, 1), ceil_mode=True, divisor_override=5),
        ),
        r(1, 2, 8, 11),
    ),
    "means of windows that differ by one": (
        lambda x: (
            F.adaptive_avg_pool3d(x, (3, 4, 5)),
            F.adaptive_avg_pool3d(x[0], (None, 9, 1)),
            F.adaptive_avg_pool3d(x, (7, 4, 5)),
            F.adaptive_avg_pool3d(x, (7, 8, 11)),
            F.interpolate(x, size=(3, 5, 2), mode="area"),
        ),
        torch.cat([r(1, 2, 7, 8, 11), torch.full((1, 2, 7, 8, 11), math.inf)]),
    ),
    "an output padded by strides": (
        lambda x, w, b: (
            F.conv_transpose2d(x, w, output_padding=1, dilation=2),
            F.conv_transpose2d(x, w, b, (1, 3), (0, 2), (1, 1), 2, (3, 1)),
            F.conv_transpose1d(x.sum(2), w[:, :, 0], None, 1, 1, 2, 1, 3),
        ),
        *(r(1, 4, 5, 6), r(4, 3, 3, 3), r(6)),
    ),
    "unpooled channels last": (
        lambda x, i: F.max_unpool2d(x, i, 2),
        *(
            each.to(memory_format=torch.channels_last)
            for each in F.max_pool2d(r(2, 3, 4, 4), 2, return_indices=True)
        ),
    ),
    "unpooled in one dimension": (
        lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2),
        r(2, 3, 8),
    ),
    "pools without a window in the padding": (
        lambda x: (
            F.max_pool2d(x, 2, 2, 1, ceil_mode=True, return_indices=True),
            F.avg_pool2d(x, 2, 2, 1, ceil_mode=True),
        ),
        r(1, 2, 7, 6),
    ),
    "the middle of all": (lambda x: (x.median(), x.median(1), x.abs().sum().median(0)), r(4, 5)),
    "the middle beside NaN": (lambda x: (x.median(), x.median(1)), ODD.reshape(4, 5)),
    "a stable sort": (
        lambda x: (x.sort(stable=True), x.sort(stable=True, descending=True)),
        (r(500) * 3).round(),
    ),
    "running products": (lambda x: (x.cumprod(1), x.cumprod(0)), r(4, 5)),
    "running products that overflow": (lambda x: x.cumprod(0), T([1e30, 1e30, 1e-30, 1e-30])),
    "running products of integers": (lambda x: x.cumprod(0), torch.full((30,), 7)),
    "running extremes": (lambda x: (x.cummax(0), x.cummin(1)), ODD.reshape(4, 5)),
    "running extremes of integers": (lambda x: (x.cummax(0), x.cummin(0)), BIG),
    "running sums of exponentials": (
        lambda x: (x.logcumsumexp(0), x.logcumsumexp(1)),
        ODD.reshape(4, 5),
    ),
    "scattered mean": (
        lambda x, i, s: (
            x.scatter_reduce(0, i, s, "mean"),
            x.scatter_reduce(0, i, s, "mean", include_self=False),
        ),
        *(r(5, 3), PLACES, r(4, 3)),
    ),
    "scattered part": (
        lambda x, i, s: (x.scatter(0, i, s), x.scatter_add(0, i, s)),
        *(r(5, 3), T([[0, 1], [2, 4]]), r(4, 3)),
    ),
    "scattered product": (
        lambda x, i, s: x.scatter(0, i, s, reduce="multiply"),
        r(5, 3),
        PLACES,
        r(4, 3),
    ),
    "scattered number": (lambda x, i: x.scatter(0, i, 2.5, reduce="add"), r(5, 3), PLACES),
    "scatter of one number": (lambda x, i, s: x.scatter(0, i, s), r(1)[0], T(0), r(1)[0]),
    "reduced by index": (
        lambda x, i, s: [
            x.index_reduce(1, i, s, how, include_self=with_self)
            for how in ("prod", "mean", "amax", "amin")
            for with_self in (True, False)
        ],
        *(r(3, 4), T([0, 2, 0]), r(3, 3)),
    ),
    "unpooled": (
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        r(2, 3, 4, 4),
    ),
    "put": (lambda x, i, s: x.clone().put_(i, s, True), r(4, 3), T([1, -1, 1]), r(3)),
    "a bilinear form": (F.bilinear, r(4, 5), r(4, 6), r(7, 5, 6), r(7)),
    "distances": (
        lambda a, b: [torch.cdist(a, b, p) for p in (0.0, 1.0, 2.0, INF)],
        r(4, 3),
        r(5, 3),
    ),
    "integers within fractions and infinities": (
        lambda x: (x.clamp(min=INF), x.clamp_max(-INF), x.clamp(-0.5, INF), x.clamp_min(2.5)),
        T([-3, 0, 7]),
    ),
    "numbers times logarithms of numbers": (
        lambda x: (torch.xlogy(0.0, x), torch.xlogy(x, NAN), torch.xlogy(x, 2), torch.xlogy(3, x)),
        T([0.0, NAN, 2.0, INF, -1.0]),
    ),
    "differences that are NaN": (
        lambda a, b: [torch.cdist(a, b, p) for p in (0.0, 1.0, 2.0)],
        *(T([[0.0, NAN], [INF, 1.0]]), T([[0.0, 1.0], [INF, INF], [2.0, 1.0]])),
    ),
    "the largest beside NaN": (
        lambda x: (x.max(), x.min(), x.amax(1), x.amin((0, 1)), x.aminmax(dim=0), x.argmax()),
        SPOILT,
    ),
    "the place of the largest beside NaN": (
        lambda x: (x.max(1), x.min(0), x.argmax(0), x.argmin(1), x.argmin(keepdim=True)),
        SPOILT,
    ),
    "sorted beside NaN": (
        lambda x: (x.sort(stable=True), x.sort(dim=0, descending=True, stable=True), x.msort()),
        SPOILT,
    ),
    "the first of all beside NaN": (
        lambda x: (x.topk(2)[0], x[2].topk(4), x[2].topk(4, largest=False)),
        SPOILT,
    ),
    "strides over a result": (lambda x: (x * 2).as_strided((3, 2), (1, 3), 1) * 2, r(6, 3)),
    "strides over a result, looked at": (
        lambda x: (x * 2).view(18).as_strided((4, 6), (4, 1)) * 2,
        r(6, 3),
    ),
    "strides over an input": (lambda x: x.as_strided((4, 6), (4, 1)) * 2, r(6, 3)),
    "quantile beside NaN": pytest.param(
        (lambda x: x.quantile(0.3, dim=1), SPOILT),
        marks=needs_torch("2.12", "Dynamo leaves it out of the graph"),
    ),
    "norms beside NaN": (
        lambda x: [torch.linalg.vector_norm(x, p, 1) for p in (0, 1, 2, INF, -INF)],
        SPOILT,
    ),
    "running extremes beside NaN": (lambda x: (x.cummax(1), x.cummin(1)), SPOILT),
    "scattered extremes beside NaN": (
        lambda x, s: [
            x.scatter_reduce(0, T([0, 1, 1, 0, 3]), s, how, include_self=with_self)
            for how in ("amax", "amin")
            for with_self in (True, False)
        ],
        *(T([1.0, NAN, 3.0, NAN]), T([NAN, 1.0, 5.0, -INF, 2.0])),
    ),
    "max pooling beside NaN": (
        lambda x: [
            F.max_pool2d(x, 3, 2, 1, dilation, ceil_mode=ceil, return_indices=True)
            for dilation in (1, 2)
            for ceil in (False, True)
        ],
        IMAGES,
    ),
    "max pooling in other dimensions": (
        lambda x: (F.max_pool2d(x, 2), F.max_pool1d(x[0], 3, 2, 1), F.max_pool3d(x, (1, 2, 2))),
        IMAGES,
    ),
    "max pooling of what is not below zero": (
        lambda x: (F.max_pool2d(x.relu(), 3, 2, 1), F.max_pool2d(x.abs().relu() * 3e38, 2)),
        IMAGES,
    ),
    "max pooling of minus infinity": (
        lambda x: (F.max_pool2d(x, 3, 1, 1), F.max_pool1d(x[0], 2), F.max_pool2d(x.double(), 2)),
        torch.full((2, 8, 4, 4), -INF).index_fill(3, T([3]), -1e38),
    ),
    "max pooling of the lowest number": (
        lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 1, 1), F.max_pool1d(x[0], 2)),
        torch.full((2, 8, 4, 4), torch.finfo(torch.float32).min),
    ),
    "max pooling of NaN and minus infinity": (
        lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 2, 1)),
        torch.full((2, 8, 4, 4), -INF).index_fill(3, T([2]), NAN).index_fill(3, T([3]), 3.0),
    ),
    "max pooling with windows in the padding": (
        lambda x: F.max_pool1d(x, 2, 1, 1, 3),
        r(2, 8, 4),
    ),
    "ranks": (lambda x: (x.kthvalue(2), x.kthvalue(3, 0, keepdim=True)), r(4, 5)),
    "the middle of what is no NaN": (
        lambda x: (x.nanmedian(), x.nanmedian(1), x.nanmedian(0)[0]),
        T([[1, NAN, 3, 0.5], [NAN, NAN, 2, 7], [INF, -INF, NAN, 4]]),
    ),
    "places among ordered numbers": (
        lambda x: (
            torch.searchsorted(T([-1.0, 0, 1, 1, INF]), x),
            torch.searchsorted(T([-1.0, 0, 1, 1, INF]), x, right=True, out_int32=True),
            torch.searchsorted(x[:2].sort().values, x[:2], side="right"),
            torch.searchsorted(T([-1.0, 0, 1]), 0.5),
            torch.searchsorted(T([1, 2, 3]), 2.5),
            torch.searchsorted(T([1, 2, 3]), 2),
        ),
        ODD,
    ),
    "a diagonal put in": (lambda x, y: x.diagonal_scatter(y, 1, 2, 0), r(3, 4, 5), r(4, 2)),
    "full in float64": (
        lambda x: (x.new_full((2, 3), 0.1), torch.full_like(x, 0.1)),
        r(5).double(),
    ),
    "distances of batches": (torch.cdist, r(2, 1, 4, 3), r(5, 4, 3)),
    "repeated without dimensions": (lambda x: x.repeat(()) + 1, T(2.0)),
    "clamp on one side": (lambda x: (x.clamp(min=-1), x.clamp(max=1), x.clamp_min(0.5)), ODD),
    "roots by powers": (lambda x: (x**0.5, x**-0.5), ODD),
    "rests of a number": (lambda x: (x % 2.0, x % -3.0, x // 2.0, x // -3.0), USUAL),
    "a number divided": (
        lambda x: (7 // x, torch.div(-2.5, x, rounding_mode="floor"), 7 % x, -2.5 % x),
        USUAL,
    ),
    "a number divided by infinity": (lambda x: (7 // x, 7 % x, -7 % x), T([INF, -INF, NAN, 2])),
    "large integers rounded towards zero": (
        lambda x: [(torch.div(x, n, rounding_mode="trunc"), torch.fmod(x, n)) for n in (7, -3)],
        T([2**31 - 1, 2 - 2**62, 2**62 + 1, -7, 6]),
    ),
    "large integers rounded down": (
        lambda x: [torch.div(x, n, rounding_mode="floor") for n in (60, 3, -3)],
        T([1_700_000_123, 50_331_651, 2**31 - 1, 2 - 2**62, 2**62 + 1, -7, 6]),
    ),
    "a diagonal among infinities": (
        lambda x: (x.diagonal().exp(), torch.trace(x) + 1, x.diagonal(1) * 2, x.diagonal(-2) * 2),
        torch.full((4, 4), -INF).diagonal_scatter(r(4)).contiguous(),
    ),
    "diagonals of many matrices": (
        lambda x: (x.diagonal(0, -2, -1) * 2, x.diagonal(-1, 2, 0) * 2),
        r(3, 4, 5),
    ),
    "shifts": (lambda x: (x << 3, x << 64, x >> 1, x >> 70), T([1, 3, 70])),
    "a diagonal of large integers": (lambda x: x.diagonal() + 1, T([[2**62 + 1, 5], [7, 3]])),
    "a window by Hamming": (lambda x: x * torch.hamming_window(16), r(16)),
    "a mean in another dtype": (
        lambda x, y: (x.mean(-1, dtype=torch.float32), y.mean(1, True, dtype=torch.float64)),
        T([[1, 2]], dtype=torch.int32),
        r(4, 1000),
    ),
    "rests of integers by floats": (
        lambda x, y: (x % 0.1, x // 0.1, x % INF, y % x, y // x, torch.xlogy(x - 2, y * NAN)),
        T([1, 2, 3, 4]),
        T([1e10, -7.5, 0.3, INF]),
    ),
    "infinities in float64": (
        lambda x: (x.isinf(), x.isposinf(), x.isneginf(), x.nan_to_num(), x * 2),
        T([1e300, -1e300, 1.0, INF, -INF, NAN], dtype=torch.float64),
    ),
    "a sum of one integer": (lambda x: (x.sum(), x.sum(0), x.sum(-1, keepdim=True)), T(2**62)),
    "a rest by a number that wraps": (
        lambda x: torch.fmod(x, 1000),
        T([-7, 100], dtype=torch.int8),
    ),
    "sums of large integers": (
        lambda x, y: (x.sum(), x.sum(-1), x.sum((0, 2), keepdim=True), y.sum(1, dtype=torch.int32)),
        T([[[2**62, 2**62], [2**53, 1]], [[-(2**60) - 1, 3], [2**62, 2**61]]]),
        T([[2**30, 2**30, 5], [-7, 2**31 - 1, 2**31 - 1]], dtype=torch.int32),
    ),
    "large rests": (lambda x: x.remainder(0.3), T([1e10, -1e10, 12345.678])),
    "squeeze of more than one": (lambda x: x.squeeze(0) + 1, r(2, 3)),
    **{
        f"{f.__name__} at the edges": (f, ODD[:, None].expand(-1, 20).contiguous(), ODD)
        for f in PAIRS
    },
    **{f"{f.__name__} at the edges": (f, torch.cat([ODD, ODD / 3])) for f in SINGLES},
    **{
        f"{f.__name__} as usual": (f, USUAL[:, None].expand(-1, 17).contiguous(), USUAL)
        for f in (torch.remainder, torch.floor_divide, torch.heaviside, torch.xlogy)
    },
    "truth values chosen": (
        lambda m, a, b: (torch.where(m, a, b), torch.where(m, a, T(True)), a.masked_fill(m, True)),
        *(MASK, ~MASK[:1], MASK.roll(1, 1)),
    ),
    "truth values masked": (
        lambda m, a: (
            a.masked_fill(m, False),
            a.masked_fill(m, T(True)),
            a[:, :1].masked_fill(m, 1),
        ),
        *(MASK, ~MASK),
    ),
    "extremes of truth values": (
        lambda x: (
            x.amax(),
            x.amax(1),
            x.amin((0, 1), keepdim=True),
            x.max(),
            x.min(),
            x[0, 0].max(),
        ),
        MASK,
    ),
    "integers made whole": (
        lambda x, y: (x.floor(), x.ceil(), x.trunc(), x.t().round(), y.floor(), y.trunc()),
        *(torch.arange(-3, 3, dtype=torch.int32).reshape(2, 3), torch.arange(-3, 3)),
    ),
    "one dtype for all that is stacked": (
        lambda x, i, m: (
            torch.stack((i, x, m), 1),
            torch.hstack((m, i)),
            torch.stack((m, x.half())),
        ),
        *(r(2, 3), torch.arange(6, dtype=torch.int32).reshape(2, 3), MASK),
    ),
    "another dtype put in": (
        lambda x, y: (
            x.slice_scatter(y[:, :1], 1, 0, 1),
            x.select_scatter(y[0], 0, 1),
            y.slice_scatter(x[:1], 0, 1, 2),
        ),
        *(r(2, 3), torch.full((2, 3), 0.1, dtype=torch.float64)),
    ),
    "a form of integers": (
        F.bilinear,
        *(torch.arange(n, dtype=torch.int32).reshape(s) for n, s in ((6, (2, 3)), (8, (2, 4)))),
        *(torch.arange(n, dtype=torch.int32).reshape(s) for n, s in ((60, (5, 3, 4)), (5, (5,)))),
    ),
    "division towards zero": (
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        *(USUAL[:, None].expand(-1, 17).contiguous(), USUAL),
    ),
}

NO_DIMENSIONS = {
    **{
        name: (lambda x, n=name: getattr(x, n)(0))
        for name in (
            *(
                "sum",
                "mean",
                "amax",
                "amin",
                "prod",
                "logsumexp",
                "max",
                "min",
                "any",
                "all",
                "sort",
            ),
            *(
                "argmax",
                "argmin",
                "argsort",
                "cumprod",
                "cummax",
                "cummin",
                "logcumsumexp",
                "median",
            ),
        )
    },
    "topk": lambda x: x.topk(1),
    "norm": lambda x: x.norm(dim=0, keepdim=True),
    "mean of all": lambda x: x.mean(),
    "repeat": lambda x: x.repeat(1) + 1,
}

STRIDED = {
    "a transposed result": (lambda x: (x * 2).t().as_strided((3, 2), (1, 3), 1) * 2, r(6, 3)),
    "a part of a result": (
        lambda x: (x * 2).chunk(2)[1].as_strided((2, 2), (1, 2), 1) * 2,
        r(6, 3),
    ),
    "a part of an input": (lambda x: x.chunk(2)[0].as_strided((4, 2), (3, 1)) * 2, r(6, 3)),
    "from an input's beginning": (lambda x: x.as_strided((2, 2), (1, 2), 1) * 2, r(20)[2:]),
    "an input, transposed": (lambda x: x.t().as_strided((3, 2), (1, 3)) * 2, r(6, 3)),
    "a result that lies transposed": (
        lambda x: (x * 2).as_strided((3, 2), (1, 3)) * 2,
        r(3, 6).t(),
    ),
}
"""What is read by strides that ONNX knows nothing of; whatever is around it."""

UNSURE = {
    "roll": (lambda x: torch.roll(x, 1, 0), LAST),
    "cumprod": (lambda x: x.cumprod(0), LAST),
    "cummax": (lambda x: x.cummax(0)[0].exp(), LAST),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), LAST),
    "slice_scatter": (lambda x: torch.slice_scatter(x, x[:, :2], 1, 0, 2), LAST),
    "addr": (lambda x: torch.addr(x, x[:, 0], x[0], beta=0), r(4, 6).t()),
    "dropout of what has gaps": (lambda x: F.dropout(x, 0.5, False), r(6, 8)[:, ::2]),
}
"""Results of which torch's fake tensors do not say surely how they lie in memory."""

LEAST = {dtype: T([3, torch.iinfo(dtype).min], dtype=dtype) for dtype in (torch.int32, torch.int64)}

DECLINED = {
    "gaps that are written to": (lambda x: torch.empty_strided((4, 8), (16, 1)).copy_(x), r(4, 8)),
    "the least number by minus one": (
        lambda x: (x // -1, x % -1, torch.fmod(x, -1)),
        LEAST[torch.int32],
    ),
    "the least number of 64 bits by minus one": (
        lambda x: (torch.div(x, -1, rounding_mode="floor"), torch.remainder(x, -1)),
        LEAST[torch.int64],
    ),
    "the least number by one that wraps": (lambda x: x // (2**63 - 1), LEAST[torch.int32]),
    "elements added at places in two dimensions": (
        lambda x, i, y: x.index_put((i, i), y, accumulate=True),
        *(r(4, 4), T([0, 3, 0]), r(3)),
    ),
    "integers between tensors": (lambda x: torch.linspace(x, 50, 50, dtype=torch.int64), T(3.0)),
    "a mean of integers by another number": (
        lambda x: F.avg_pool2d(x, 2, divisor_override=3),
        torch.arange(16).view(1, 1, 4, 4),
    ),
    "a cast to half that rounds": (lambda x: x.half().to(torch.uint8), T([254.97, 1.0])),
    "a cast that wraps": (lambda x: x.long().int(), T([3e9, 1.0])),
    "an output padded by strides, channels last": (
        lambda x, w: F.conv_transpose2d(x, w, output_padding=1, dilation=2),
        *(r(1, 2, 5, 5).to(memory_format=torch.channels_last), r(2, 3, 3, 3)),
    ),
    "a nearest pixel that is reflected": (
        lambda x, at: F.grid_sample(x, at, "nearest", "reflection", False),
        *(torch.arange(8.0).view(1, 1, 1, 8), T([[[[-1.25, 0.0]]]])),
    ),
    "embedding bag": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="mean"),
        *(r(10, 5), T([5, 1, 6, 5, 6]), T([0, 3])),
    ),
    "product that wraps": (lambda a: a.prod(1), torch.full((3, 3), 2**22)),
    "integer power": (lambda a: 3**a, T([-1, 0, 5, 60])),
    "integers within bounds": (
        lambda a: F.hardtanh(a, -5, 2**24 + 3),
        T([2**31 - 1, 7], dtype=torch.int32),
    ),
    "integer power of 32 bits": (lambda a: a**11, T([2, 7, 10], dtype=torch.int32)),
    "float64 hardswish": (F.hardswish, r(9).double()),
    "float64 logarithm to base two": (torch.log2, r(9).abs().double()),
    "float64 logarithm to base ten": (torch.log10, r(9).abs().double()),
    "float64 compared with a tenth": (
        lambda x: (x == 0.1, x >= 0.1, x > 0.2),
        T([1.0, 2.0, 3.0]).double() / 10,
    ),
    "antialiased resize": (
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
        r(1, 2, 9, 9),
    ),
    "the tail of the error function": (lambda x: torch.erfc(x).log(), T([3.0, 4.0, 5.0])),
    "log of the normal distribution": (torch.special.log_ndtr, T([-8.0, -20.0])),
    "a pool with a window in the padding": (
        lambda x: F.max_pool2d(x, (2, 3), 2, 1, ceil_mode=True, return_indices=True),
        r(1, 2, 7, 8),
    ),
    "half precision and a large number": (lambda x: (1 - x) * -1e9, T([0.0, 1.0]).half()),
    "half precision and a small number": (lambda x: x / 1e5 + x * 1e-8, T([1e4, 6e4]).half()),
    "negative zeros chosen": (lambda x: torch.where(x > 0, -0.0, x), r(5)),
    "negative zeros filled in": (lambda x: x.masked_fill(x > 0, -0.0), r(5)),
    "negative padding": (lambda x: F.pad(x, (-4, 5, 0, 0), mode="replicate"), r(1, 1, 4, 4)),
}


def signs(value):
    """Of zeros, which compare equal."""
    tensors = (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))
    return [(x.signbit() & (x == 0)).tolist() for x in tensors if x.is_floating_point()]


def same_as_eager(function, *args) -> None:
    with torch.no_grad():
        whole = compiled(function, "onnxrt", min_coverage=1.0)
        result, expected = whole(*args), function(*args)
    double = isinstance(expected, torch.Tensor) and expected.dtype is torch.float64
    tolerance = {"rtol": 1e-14, "atol": 0.0} if double else {}
    torch.testing.assert_close(result, expected, equal_nan=True, check_stride=True, **tolerance)
    assert signs(result) == signs(expected)


def taken_and_right(function, *args) -> None:
    same_as_eager(function, *args)
    assert last().chosen == "onnxrt", last().attempts[0].message


@pytest.mark.filterwarnings("ignore:.*(in beta|is deprecated|degrees of freedom):UserWarning")
@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN)
def test_taken_and_right(case) -> None:
    """Values, dtypes, shapes and strides, on ONNX Runtime."""
    taken_and_right(*case)


def test_what_lies_on_a_bound_has_no_gradient() -> None:
    """Of a ReLU6, say, where zeros are many."""
    x = T([0.0, 6.0, 1.0, -1.0], requires_grad=True)
    f = compiled(lambda x: F.relu6(x) * 2, "onnxrt")
    (got,) = torch.autograd.grad(f(x).sum(), x)
    assert got.tolist() == [0.0, 0.0, 2.0, 0.0]
    assert last().chosen == "onnxrt"


def test_rows_that_are_added_to_more_than_once_lose_nothing() -> None:
    """ONNX Runtime adds up what ``ScatterND`` puts by several threads at once."""
    rows, places = torch.ones(200_000, 16), torch.zeros(200_000, dtype=torch.long)
    f = compiled(
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        {"backend": "onnxrt", "options": {"threads": 2}},
    )
    with torch.no_grad():
        for _ in range(10):
            assert f(torch.zeros(10, 16), places - 10, rows)[0].tolist() == [200_000.0] * 16
    assert (last().chosen, last().attempts[0].coverage) == ("onnxrt", 1.0)


def test_norms_of_many_are_closer_than_eagers() -> None:
    """Which adds up in float32, without a cascade."""
    x = MANY[:200_002]

    def norms(x):
        return x.norm(), x.norm(1), x.view(2, -1).norm(dim=1)

    with torch.no_grad():
        for got, exact in zip(compiled(norms, "onnxrt")(x), norms(x.double()), strict=True):
            torch.testing.assert_close(got, exact.float())
    assert last().chosen == "onnxrt"


def test_polygamma_is_as_close_as_eager() -> None:
    """Both are compared with float64: eager's series for float32 are short."""
    x = r(20) * 5
    with torch.no_grad():
        for n in range(6):
            result = compiled(lambda x, n=n: torch.polygamma(n, x), "onnxrt")(x)
            exact = torch.polygamma(n, x.double()).float()
            torch.testing.assert_close(result, exact, rtol=2e-5, atol=1e-5)
            assert last().chosen == "onnxrt", last().attempts[0].message


@pytest.mark.parametrize("function", NO_DIMENSIONS.values(), ids=NO_DIMENSIONS)
def test_a_tensor_without_dimensions_has_one_all_the_same(function) -> None:
    """Operators of ONNX take no axis of it."""
    same_as_eager(function, T(-2.5))
    assert last().chosen == "onnxrt", last().attempts[0].message


def test_a_root_is_drawn_in_float64() -> None:
    """By torch: the exponent of the translation would be of 32 bits."""
    x = r(3, 4).double()
    found = compiled(lambda x: torch.linalg.vector_norm(x * 2, 3, 1), "onnxrt")(x)
    expected = torch.linalg.vector_norm(x * 2, 3, 1)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)
    assert (last().chosen, last().attempts[0].coverage) == ("onnxrt", 48 / 51)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(3, 3)[1:], lambda x: x.split(3)])
def test_a_constant_does_not_see_what_is_written_to_a_result(view) -> None:
    """What torch evaluated once and returns, or a view of it, is copied at every call."""
    made = lambda: (view(torch.arange(0.5, 9)), torch.arange(0.5, 9) * 2)  # noqa: E731
    f = compiled(made, "onnxrt")
    with torch.no_grad():
        for each in torch.utils._pytree.tree_leaves(f()):
            each.zero_()
        torch.testing.assert_close(f(), made(), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("case", DECLINED.values(), ids=DECLINED)
def test_not_taken_and_right(case) -> None:
    """Somebody else answers."""
    same_as_eager(*case)
    assert last().chosen == "eager"


RULED = DECLINED | {f"strides over {name}": case for name, case in STRIDED.items()}
CRASHES = {"embedding bag", *(name for name in DECLINED if name.startswith("the least number"))}
SEEN_BY_RUNNING = {"negative padding"}
RACES = {"elements added at places in two dimensions"}
"""Wrong now and then only, and of many elements."""


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@upstream
@pytest.mark.parametrize("name", sorted(RULED.keys() - CRASHES - SEEN_BY_RUNNING - RACES))
def test_rules_are_still_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its rule the case gives other results, or is not taken either."""
    monkeypatch.setattr(onnx, "why_unsupported", lambda *given: None)
    try:
        same_as_eager(*RULED[name])
    except AssertionError:
        return
    assert last().chosen == "eager", f"the rule for {name!r} can go"


NEEDED = {
    "a row masked everywhere": "_scaled_dot_product_flash_attention_for_cpu.default",
    "clamp on one side": "clamp_min.default",
    "bounds without dimensions": "clamp_min.Tensor clamp_max.Tensor",
    "full in float64": "full_like.default new_full.default",
    "remainder as usual": "remainder.Tensor",
    "rests of a number": "remainder.Scalar",
    "a number divided": "remainder.Scalar_Tensor div.Tensor_mode",
    "functions of two that lie otherwise": "floor_divide.default atan2.default "
    "copysign.Tensor fmax.default",
    "log1p at the edges": "log1p.default",
    "expm1 at the edges": "expm1.default",
    "running sums of exponentials": "logaddexp.default logcumsumexp.default",
    "fmin at the edges": "fmin.default",
    "hypot at the edges": "hypot.default",
    "float64 with the slope of a hundredth": "leaky_relu.default",
    "celu of float64": "celu.default",
    "elu with scales": "elu.default",
    "float64 degrees": "deg2rad.default",
    "float64 radians": "rad2deg.default",
    "sigmoids of float64": "sigmoid.default",
    "sigmoids of float64 as a factor": "silu.default",
    "sign at the edges": "sign.default",
    "signbit at the edges": "signbit.default",
    "trunc at the edges": "trunc.default",
    "infinities in float64": "isinf.default isposinf.default isneginf.default",
    "heaviside as usual": "heaviside.default",
    "a float less multiples of integers": "rsub.Scalar",
    "rests of integers by floats": "xlogy.Tensor",
    "numbers times logarithms of numbers": "xlogy.Scalar_Self xlogy.Scalar_Other",
    "exact logarithms": "log2.default log10.default",
    "logits of NaN between bounds": "logit.default",
    "angles": "angle.default",
    "roots by powers": "pow.Tensor_Scalar",
    "integers made whole": "floor.default ceil.default round.default",
    "a logarithm of what a gate lets through": "glu.default",
    "an error of many": "mse_loss.default",
    "no dimensions: sort": "sort.default",
    "no dimensions: topk": "topk.default",
    "a stable sort": "sort.stable",
    "the middle of all": "median.default median.dim",
    "ranks": "kthvalue.default",
    "the middle of what is no NaN": "nanmedian.default nanmedian.dim",
    "places among ordered numbers": "searchsorted.Tensor",
    "indices of 32 bits": "index.Tensor",
    "scattered part": "scatter.src scatter_add.default",
    "scattered mean": "scatter_reduce.two",
    "scattered product": "scatter.reduce",
    "scattered number": "scatter.value_reduce",
    "the smallest of infinities alone": "index_reduce.default",
    "put": "put.default",
    "elements added at indices of 32 bits": "index_put.default",
    "pool with a divisor": "avg_pool2d.default",
    "pool with a divisor whose last windows reach further": "avg_pool3d.default",
    "pools without a window in the padding": "max_pool2d_with_indices.default",
    "a mean of parts, channels last": "_adaptive_avg_pool2d.default",
    "means of windows that differ by one": "_adaptive_avg_pool3d.default",
    "unpooled channels last": "max_unpool2d.default",
    "products to which nothing is added": "addmm.default baddbmm.default",
    "a sum of products of large integers": "addbmm.default",
    "a bilinear form": "_trilinear.default",
    "distances": "_cdist_forward.default",
    "a vector, and a transposed matrix with one": "addmv.default",
    "a sum of many": "mean.default sum.default sum.dim_IntList",
    "a mean in another dtype": "mean.dim",
    "no dimensions: prod": "prod.dim_int",
    "no dimensions: logsumexp": "logsumexp.default",
    "no dimensions: any": "any.dim",
    "truths along no dimensions": "any.dims all.dims",
    "no dimensions: all": "all.dim",
    "the largest of all": "amax.default amin.default",
    "extremes of truth values": "max.default min.default",
    "the first true one": "max.dim",
    "no dimensions: min": "min.dim",
    "no dimensions: argmax": "argmax.default",
    "no dimensions: argmin": "argmin.default",
    "norms beside NaN": "linalg_vector_norm.default",
    "a variance of few": "var.correction",
    "sums so far": "cumsum.default",
    "scans, channels last": "cumprod.default cummax.default cummin.default",
    "one dtype for all that is stacked": "stack.default",
    "a copy of fewer numbers": "copy.default",
    "another dtype put in": "slice_scatter.default select_scatter.default",
    "a diagonal put in": "diagonal_scatter.default",
    "erfinv at the edges": "erfinv.default",
    "next to a pole": "lgamma.default digamma.default",
    "a Bessel function of float64": "special_spherical_bessel_j0.default",
    "logarithms of sums of powers of two": "logaddexp2.default",
    "signs of numbers": "copysign.Scalar",
}
"""Cases, and the operators whose entries in the lowering they need."""

NEEDED_HERE = {
    "sums of large integers": "sum.default",
    "a sum of products of large integers": "sum.dim_IntList",
    "the largest of large integers": "amax.default amin.default max.default min.dim",
    "maximum of large integers": "maximum.default",
    "minimum of large integers": "minimum.default",
    "relu of large integers": "relu.default",
    "clamp of large integers": "clamp.default",
    "a logarithm of softmax in float64": "_log_softmax.default",
    "a transposed matrix with a vector": "mv.default",
    "an output padded by strides": "convolution.default",
    "what is added to rows, transposed": "index_put.default",
    "truth values chosen": "where.self masked_fill.Scalar",
    "truth values masked": "masked_fill.Tensor",
    "float16 compared with a tenth": "eq.Scalar ne.Scalar lt.Scalar ge.Scalar",
    "large integers within one bound": "clamp_min.default clamp_max.default",
    "extremes of large integers": "min.default max.dim",
}
"""The same for the entries of ONNX Runtime's own."""

MENDED = {torch.ops.aten.max_unpool2d.default: ("torch", "2.14")}
"""Where the entry can go with the last version before this one."""

LATER = {torch.ops.aten.rsub.Scalar: needs_torch("2.13", "the exporter is right")}
"""Where the entry is for newer versions than the oldest."""


def cases_of(table: Mapping[str, str], entries: Callable[[], Operators]) -> Iterator[Any]:
    """The cases of a table, with the function that returns the entries of today."""
    for case, names in table.items():
        for name in names.split():
            operator = functools.reduce(getattr, name.split("."), torch.ops.aten)
            marks = LATER.get(operator, ())
            yield pytest.param(entries, operator, case, id=f"{name}: {case}", marks=marks)


@upstream
@pytest.mark.filterwarnings("ignore:.*(in beta|is deprecated|degrees of freedom):UserWarning")
@pytest.mark.parametrize(
    ("entries", "operator", "case"),
    [*cases_of(NEEDED, operators), *cases_of(NEEDED_HERE, entries)],
)
def test_entries_are_still_needed(entries, operator, case: str, monkeypatch) -> None:
    """Without the operator's decomposition the case gives other results, or is not taken."""
    plain = dataclasses.replace(entries()[operator], decompose=None)
    monkeypatch.setitem(entries(), operator, plain)
    alike = case.removeprefix("no dimensions: ")
    package, version = MENDED.get(operator, ("onnxruntime", None))
    with fault_of(package, before=version), pytest.raises(AssertionError):
        taken_and_right(*(TAKEN[case] if case in TAKEN else (NO_DIMENSIONS[alike], T(-2.5))))


TRANSLATED = {
    "the largest of infinities alone": "scatter_reduce.two",
    "the largest beside NaN": "amax.default amin.default max.default min.default",
    "the place of the largest beside NaN": "max.dim min.dim argmax.default argmin.default",
    "max pooling beside NaN": "max_pool2d_with_indices.default",
    "max pooling in other dimensions": "max_pool3d_with_indices.default",
    "a diagonal among infinities": "diagonal.default diagonal_copy.default",
}
"""Cases, and the operators whose translations they need."""


def without_translation_of(operator, monkeypatch) -> None:
    entries = {**operators(), operator: dataclasses.replace(operators()[operator], translate="")}
    made = translator_with(entries)
    monkeypatch.setattr(onnx, "translator", lambda: made)


@upstream
@pytest.mark.parametrize(("entries", "operator", "case"), [*cases_of(TRANSLATED, operators)])
def test_translations_are_still_needed(entries, operator, case: str, monkeypatch) -> None:
    """With the exporter's own the case gives other results, or is not taken."""
    without_translation_of(operator, monkeypatch)
    try:
        same_as_eager(*TAKEN[case])
    except AssertionError:
        return
    assert last().chosen == "eager", f"the translation of {operator} can go"


@upstream
@pytest.mark.parametrize("name", ["embedding", "index_select", "gather", "scatter_add"])
def test_onnx_still_counts_indices_from_the_end(name: str, monkeypatch) -> None:
    """Without the translation that checks them, what eager refuses is answered."""
    without_translation_of(getattr(torch.ops.aten, name).default, monkeypatch)
    run, x = compiled(OUT_OF_RANGE[name], "onnxrt"), r(4)
    with torch.no_grad():
        run(x, T([1, 2]))
        assert run(x, T([1, -1])).isfinite().all()
    assert last().runtime.fallbacks == 0


@upstream
def test_onnx_runtime_still_loses_the_tails_of_sigmoids(monkeypatch) -> None:
    """They are written out for it; ``tails`` can go when it does not."""
    monkeypatch.setattr(onnxrt, "keep_tails", lambda gm: None)
    with pytest.raises(AssertionError):
        same_as_eager(*TAKEN["a logarithm of a sigmoid"])


@upstream
def test_onnx_runtime_took_rests_of_integers_in_float64(monkeypatch) -> None:
    """The entry can go with the last version that is supported and does so."""
    monkeypatch.delitem(entries(), torch.ops.aten.fmod.Scalar)
    with fault_of("onnxruntime", before="1.32"), pytest.raises(AssertionError):
        same_as_eager(lambda x: torch.fmod(x, 7), T([2**60 + 1, -(2**60) - 5]))


@upstream
def test_onnx_runtime_put_nan_anywhere_among_the_first() -> None:
    """The keys by which ``sort`` and ``topk`` order can go with that version, too."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    node = onnx.helper.make_node("TopK", ["x", "k"], ["values", "places"])
    sizes = onnx.helper.make_tensor("k", onnx.TensorProto.INT64, [1], [5])
    kinds = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 5])]
    found = onnx.helper.make_tensor_value_info("values", onnx.TensorProto.FLOAT, [4, 5])
    graph = onnx.helper.make_graph([node], "first", kinds, [found], [sizes])
    opset = onnx.helper.make_opsetid("", 18)
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[opset])
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (values,) = session.run(None, {"x": SPOILT.numpy()})
    expected = SPOILT.sort(-1, descending=True).values
    with fault_of("onnxruntime", before="1.32"), pytest.raises(AssertionError):
        torch.testing.assert_close(torch.from_numpy(values), expected, equal_nan=True)


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("case", STRIDED.values(), ids=STRIDED)
def test_memory_read_by_strides_is_right_among_what_is_taken(case, engine: str) -> None:
    """Views on the way to it are torch's too; the engine computes what comes before and after."""
    function, x = case
    with torch.no_grad():
        run = compiled(lambda x: function(x + 1).exp(), engine, min_coverage=0.0)
        torch.testing.assert_close(run(x), function(x + 1).exp())
        assert last().chosen == engine, last().attempts[0].message
        run = compiled(lambda x: function(x).exp(), engine, min_coverage=0.0)
        torch.testing.assert_close(run(x), function(x).exp())


@pytest.mark.parametrize("name", UNSURE)
def test_memory_that_may_lie_otherwise_is_not_read_by_strides(name: str) -> None:
    """Not by torch either, behind an engine: the captured graph answers."""
    function, x = UNSURE[name]

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(function(x), (3, 4), (3, 1), 2) * 2

    with torch.no_grad():
        run = compiled(program, "onnxrt", min_coverage=0.0)
        torch.testing.assert_close(run(x), program(x))
    if not (name.startswith("dropout") and torch.__version__ >= "2.14"):  # it is no call there
        assert last().attempts[0].reason == "output_mismatch"


def test_memory_of_a_mean_is_read_by_strides() -> None:
    """Pooling to one place of ``channels_last`` does, and is taken whole."""
    run = compiled(lambda x: F.adaptive_avg_pool2d(x * 2, 1).flatten(1), "onnxrt", min_coverage=1.0)
    with torch.no_grad():
        torch.testing.assert_close(run(LAST), F.adaptive_avg_pool2d(LAST * 2, 1).flatten(1))
    assert last().chosen == "onnxrt", last().attempts[0].message


@upstream
def test_fake_tensors_lie_otherwise_than_real_ones() -> None:
    """The quirk behind ``decline_unsure_memory``; when this fails, one reason for it is gone."""
    with FakeTensorMode() as mode:
        fake = torch.roll(mode.from_tensor(LAST), 1, 0)
    assert fake.stride() != torch.roll(LAST, 1, 0).stride()


def test_a_write_through_strides_is_right_among_what_is_taken() -> None:
    """Which AOTAutograd turns into a scatter that goes by strides."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).flip(0)
        y.as_strided((2, 2), (1, 2), 1).mul_(3)
        return torch.as_strided_scatter(y.exp().chunk(3)[1], y[:2, :2], (2, 2), (1, 2), 1).exp()

    x = r(6, 3)
    with torch.no_grad():
        run = compiled(program, "onnxrt", min_coverage=0.0)
        torch.testing.assert_close(run(x), program(x))
        assert last().chosen == "onnxrt", last().attempts[0].message


def test_sums_of_integers_are_products_on_the_cpu_only() -> None:
    """Torch has no product of integers on a GPU, which would run what an engine leaves."""
    assert sum_of_integers(torch.ones(2, 3, dtype=torch.int64)) == 6
    elsewhere = torch.ones(2, 3, dtype=torch.int64, device="meta")
    assert sum_of_integers(elsewhere) is NotImplemented


def test_integer_division_by_zero_does_not_end_the_process() -> None:
    """ONNX Runtime's kernel would; eager raises."""
    f = compiled(lambda a, b: torch.div(a, b, rounding_mode="floor"), "onnxrt")
    with torch.no_grad(), pytest.raises(RuntimeError, match="ZeroDivision"):
        f(T([1, 2]), T([1, 0]))
    assert last().chosen == "eager"


TRAP = """
import numpy, onnx, onnxruntime
node = onnx.helper.make_node("Div", ["a", "b"], ["c"])
values = [onnx.helper.make_tensor_value_info(each, onnx.TensorProto.INT32, [1]) for each in "abc"]
graph = onnx.helper.make_graph([node], "g", values[:2], values[2:])
opsets = [onnx.helper.make_opsetid("", 18)]
model = onnx.helper.make_model(graph, ir_version=9, opset_imports=opsets).SerializeToString()
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
feeds = {"a": numpy.int32([-2**31]), "b": numpy.int32([-1])}
session.run(None, feeds)
"""


@upstream
@pytest.mark.skipif(platform.machine() != "x86_64", reason="others divide without a trap")
def test_onnx_runtime_divides_the_least_number_with_a_trap() -> None:
    """The quirk behind ``_integer_division`` (1.31.1); when this fails, -1 is a divisor as any."""
    assert subprocess.run([sys.executable, "-c", TRAP], check=False).returncode == -signal.SIGFPE


NUMBERS = {
    "product": lambda x: x * (x.sum().item() / 3),
    "full": lambda x: torch.full((2,), x.sum().item() / 3, dtype=torch.float64),
    "clamp": lambda x: x.clamp(max=x.sum().item() / 7),
    "comparison": lambda x: x == x[0].item(),
    "returned": lambda x: x.sum().item() * 2,
}


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_numbers_read_from_float64_keep_their_digits(function) -> None:
    """They are symbols in the graph, which the exporter writes as float32."""
    x = T([0.1, 0.7, 1.3]).double() / 3
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = compiled(function, "onnxrt", "aot_eager", min_coverage=0.0)
        for _ in range(2):
            torch.testing.assert_close(run(x), function(x), rtol=1e-14, atol=0.0)


OUT_OF_RANGE = {
    "embedding": lambda x, i: F.embedding(i, x[:, None]),
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i),
    "scatter": lambda x, i: x.scatter(0, i, 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i, x[:2]),
}


@pytest.mark.parametrize("function", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_out_of_range_is_an_error(function, index: int) -> None:
    """A negative one, too: ONNX would count it from the end."""
    run, x = compiled(function, "onnxrt"), r(4)
    with torch.no_grad():
        torch.testing.assert_close(run(x, T([1, 2])), function(x, T([1, 2])))
        assert last().chosen == "onnxrt"
        with pytest.raises(Exception, match=r"bounds|range|index"):
            run(x, T([1, index]))


def test_wrong_inputs_in_the_first_call_are_not_the_engines_fault() -> None:
    """The trial run is on them; the program's error is eager's, and right inputs are answered."""
    run, x = compiled(OUT_OF_RANGE["index_select"], "onnxrt"), r(4)
    with torch.no_grad():
        with pytest.raises(IndexError, match="out of range"):
            run(x, T([1, 4]))
        torch.testing.assert_close(run(x, T([1, 2])), x[1:3])
    assert (last().chosen, last().runtime.calls) == ("onnxrt", 2)
    assert last().runtime.fallbacks == 0


def test_gaps_of_an_empty_tensor_are_kept() -> None:
    """What torch evaluated once is not given in a copy without them."""
    with torch.no_grad():
        made = compiled(lambda x: x.new_empty_strided((2, 3), (7, 8)), "onnxrt")(r(5))
    assert made.stride() == (7, 8)


def test_strides_of_nothing_may_be_dynamic() -> None:
    """A part of an input without elements is at the steps of the whole, which vary."""
    function = lambda x: x[:, :1] * 2 + x.exp()  # noqa: E731
    run, x = compiled(function, "onnxrt"), torch.zeros(0, 6, 2)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        assert run(x).shape == (0, 6, 2)
    assert last().chosen == "onnxrt", last().attempts[0].message


def test_what_is_asserted_of_nothing_is_no_value() -> None:
    """Of an index without elements torch can say at once that it has no negative one."""
    function = lambda x, i: (F.one_hot(i, 4) + 1, x.exp())  # noqa: E731
    same_as_eager(function, r(3), torch.zeros(0, dtype=torch.int64))
    assert last().chosen == "onnxrt", last().attempts[0].message


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_exponent_may_be_dynamic(engine: str, sign: int) -> None:
    """The exporter takes one that is known."""
    function = lambda x, n: (x.abs() + 0.5) ** (sign * n)  # noqa: E731
    run, x = compiled(function, engine), r(3, 4)
    with torch.no_grad():
        for exponent in (2, 3, 5):
            torch.testing.assert_close(run(x, exponent), function(x, exponent))
    assert (last().chosen, last().attempts[0].coverage) == (engine, 1.0)


def test_a_dynamic_dimension_is_not_squeezed_for_good() -> None:
    """Squeezing a size that is not one is a no-op in torch, an error in ONNX."""
    f = compiled(lambda x: x.squeeze(1).relu(), "onnxrt", dynamic=True)
    with torch.no_grad():
        for size in (4, 6):
            assert f(r(3, size, 5)).shape == (3, size, 5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: F.pad(x, (0, -(-x.shape[0] // 4) * 4 - x.shape[0])) + x.shape[0] // 2,
        lambda x, n: x + n // 2,
    ],
    ids=["a pad to a multiple of four", "half of a number"],
)
def test_integers_are_divided_towards_minus_infinity(function) -> None:
    """ONNX rounds towards zero."""
    run = compiled(function, "onnxrt", dynamic=True)
    with torch.no_grad():
        for size, number in ((6, 7), (7, -5), (8, 4)):
            torch.testing.assert_close(run(r(size), number), function(r(size), number))
    assert last().chosen == "onnxrt", last().attempts[0].message


def test_what_only_shows_at_run_time_shows_while_compiling(monkeypatch) -> None:
    """A session that fails on the first inputs is a failed attempt, not the user's error."""
    monkeypatch.setattr(BoundRegion, "__call__", lambda self, *args: 1 / 0)
    same_as_eager(torch.sin, r(3))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("failed", "build_failed")
    assert attempt.error_type == "ZeroDivisionError"


@upstream
def test_onnx_runtime_still_forgets_a_transposition() -> None:
    """Before a vector; ``matrix_vector`` can go when it does not."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    kinds = [onnx.helper.make_tensor_value_info(n, 1, s) for n, s in (("a", [4, 4]), ("x", [4]))]
    nodes = [
        onnx.helper.make_node("Transpose", ["a"], ["t"]),
        onnx.helper.make_node("MatMul", ["t", "x"], ["y"]),
    ]
    result = onnx.helper.make_tensor_value_info("y", 1, [4])
    graph = onnx.helper.make_graph(nodes, "product", kinds, [result])
    opset = onnx.helper.make_opsetid("", 18)
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[opset])
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    a, x = r(4, 4), r(4)
    (found,) = session.run(None, {"a": a.numpy(), "x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), a @ x)  # and not a.T @ x


def test_spectral_normalisation_trains() -> None:
    """Its power iteration multiplies by the transposed weight and writes what it finds."""
    plain = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 6))
    twin = copy.deepcopy(plain)
    served = compiled(twin, "onnxrt", on_exhausted="raise")
    for _ in range(3):
        x = torch.randn(2, 4)
        found, expected = served(x), plain(x)
        torch.testing.assert_close(found, expected)
        for each in (found, expected):
            each.square().sum().backward()
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
