"""Gradients through ONNX Runtime, operator by operator: those of eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, last
from torch.fx.experimental.proxy_tensor import make_fx

import composer
from composer.graphs.nodes import value_of
from composer.lowering.operators.pool_gradients import avg_pool_backward

pytestmark = pytest.mark.slow


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def gradients(function: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    """Of all arguments that are floats, for an upstream gradient that is no constant."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
    result = function(*leaves)
    upstream = torch.linspace(-1, 2, result.numel()).reshape(result.shape)
    inputs = [x for x in leaves if x.requires_grad]
    return list(torch.autograd.grad(result, inputs, upstream))


SAME = {
    "sgn": (torch.sgn, r(3, 4)),
    "mean pooling": (lambda x: F.avg_pool2d(x, 3, 2, 1), r(2, 3, 8, 9)),
    "mean pooling with a rest": (lambda x: F.avg_pool2d(x, (2, 3), 4), r(2, 3, 9, 10)),
    "mean pooling of what is no padding": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        r(2, 3, 8, 9),
    ),
    "mean pooling of parts of windows": (
        lambda x: (
            F.avg_pool2d(x, 3, 2, 1, True) * F.avg_pool2d(x, 3, 2, 1, True, count_include_pad=False)
        ),
        r(2, 3, 8, 10),
    ),
    "mean pooling in three dimensions": (
        lambda x: F.avg_pool3d(x, 2, 2, divisor_override=3),
        r(2, 3, 4, 6, 6),
    ),
    "mean pooling of all": (lambda x: F.avg_pool2d(x, 9, ceil_mode=True), r(2, 3, 7, 5)),
    "mean pooling of more than all": (
        lambda x: F.avg_pool2d(x, 9, 2, 4, True, count_include_pad=False),
        r(2, 3, 5, 7),
    ),
    "adaptive mean pooling": (lambda x: F.adaptive_avg_pool2d(x, (2, 4)), r(2, 3, 6, 8)),
    "an output padded by strides": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=2, dilation=3).tanh().exp(),
        *(r(1, 2, 5, 5), r(2, 3, 3, 3)),
    ),
    "images between tokens": (
        lambda x, images: x.masked_scatter((x > 0)[..., :1], images).tanh() * 2,
        *(r(2, 5, 3), r(4, 8)),
    ),
    "losses that are not numbers": (
        lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5) * F.smooth_l1_loss(x, y),
        *(torch.tensor([1.0, 0.1, -0.5, torch.nan]), torch.zeros(4)),
    ),
    "losses of halves that are not numbers": (
        lambda x: F.smooth_l1_loss(x, torch.zeros(4).half(), reduction="none", beta=0.5),
        torch.tensor([1.0, 0.1, -0.5, torch.nan]).half(),
    ),
    "a loss of small probabilities": (
        lambda x: F.binary_cross_entropy(
            torch.sigmoid(x).squeeze(1), torch.ones(3), reduction="none"
        ),
        torch.tensor([[-20.0], [-30.0], [3.0]]),
    ),
    "a diagonal": (lambda x: x.diagonal(1, 2, 0) * 2, r(3, 4, 5)),
    "a diagonal put in": (lambda x, y: x.diagonal_scatter(y, -1) * 2, r(4, 4), r(3)),
    "an integer and a float as bounds": (lambda x: (x * 2).clamp(0, 1.5), r(4, 4)),
    "a margin": (lambda x: x.clamp_min(0) * 2 + F.hinge_embedding_loss(x, x.sign()), r(4, 4)),
    "windows": (lambda x: x.unfold(1, 3, 2) * 2, r(2, 9)),
    "the length and the direction of weights": (
        lambda v, g: torch._weight_norm(v, g, 0) * 2,
        *(r(3, 4, 2), r(3, 1, 1)),
    ),
    "the length of each column": (lambda v, g: torch._weight_norm(v, g, 1) * 2, r(3, 4), r(1, 4)),
    "distances, one of them zero": (
        lambda x, y: torch.cdist(x, torch.cat([x[:, :1], y], 1)),
        *(r(2, 3, 4), r(2, 5, 4) + 1),
    ),
    "a running product with a zero": (lambda x: x.round().cumprod(1), r(3, 4)),
    "a rank": (lambda x: x.kthvalue(2, 0)[0], r(4, 4)),
}


CLASSES = torch.tensor([0, 5, 2, 3])
LOSSES = {
    f"{kind} by {reduction}, {what}": (functools.partial(loss, reduction=reduction, **given), x, y)
    for kind, loss, x, y in (
        ("cross entropy", F.cross_entropy, r(4, 6), CLASSES),
        (
            "cross entropy of images",
            F.cross_entropy,
            r(2, 6, 3, 3),
            torch.arange(18).view(2, 3, 3) % 6,
        ),
        ("likelihood", F.nll_loss, r(4, 6), CLASSES),
    )
    for reduction in ("mean", "sum", "none")
    for what, given in (
        ("plain", {}),
        ("weights", {"weight": r(6).abs()}),
        ("left out", {"ignore_index": 3}),
    )
}
"""A mean of losses divides by the targets' weights, which the forward hands to the backward."""


WHOLE = {
    "a mean over images that lie channels last": (
        lambda x: F.adaptive_avg_pool2d(x, 1) * 2,
        r(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ),
    "a mean over rows of images that lie so": (
        lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1).flatten(1).exp(),
        r(2, 12, 3),
    ),
}


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_gradients_of_means_over_channels_last_are_whole(case) -> None:
    """Eager gives such a mean strides by hand; its backward is no region of torch's for that."""
    function, *args = case
    run = compiled(lambda *args: function(*(x * 3 for x in args)), "onnxrt", min_coverage=1.0)
    found = gradients(run, *args)
    torch.testing.assert_close(found, gradients(lambda x: function(x * 3), *args))
    assert last().chosen == "onnxrt", last().attempts[0].message


@pytest.mark.parametrize("case", (SAME | LOSSES).values(), ids=SAME | LOSSES)
def test_gradients_are_eagers(case) -> None:
    """The backward, too, runs on ONNX Runtime."""
    function, *args = case
    found = gradients(compiled(function, "onnxrt", min_coverage=0.9), *args)
    torch.testing.assert_close(found, gradients(function, *args), check_stride=True, equal_nan=True)
    assert last().chosen == "onnxrt", last().attempts[0].message


def in_place(x, y):
    parts = x * 2
    parts[:, 1:].mul_(y)
    parts[0].add_(1)
    return parts.sin()


def put_in(x, y):
    made = x.new_zeros(x.shape)
    made[:, 1:] = y
    made[:, 0] = x[:, 0]
    return (made * x).cos()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [in_place, put_in])
def test_what_is_written_to_a_part_cuts_no_backward(function, dynamic: bool) -> None:
    """Autograd copies the gradient of the whole to new memory, and writes the part's to that."""
    run = compiled(function, "onnxrt", dynamic=dynamic, min_coverage=1.0)
    args = r(3, 4), r(3, 3)
    torch.testing.assert_close(gradients(run, *args), gradients(function, *args))
    assert last().chosen == "onnxrt", last().attempts[0].message


OF_SIZES = {
    "variance": lambda x: x.var(1),
    "diagonal": lambda x: (x @ x.T).diagonal(1),
    "smoothed labels": lambda x: F.cross_entropy(x, x.argmax(1), label_smoothing=0.1)[None],
}


@pytest.mark.parametrize("function", OF_SIZES.values(), ids=OF_SIZES)
def test_gradients_of_dynamic_sizes_are_eagers(function) -> None:
    """For more than the first sizes, and all of it runs on ONNX Runtime."""
    run = compiled(function, "onnxrt", dynamic=True, min_coverage=1.0)
    for x in (r(3, 4), r(5, 6)):
        torch.testing.assert_close(gradients(run, x), gradients(function, x))
    assert last().chosen == "onnxrt", last().attempts[0].message
    assert len(composer.reports()) == 1


def assert_gradients_are_eagers(run, model: torch.nn.Module, x: torch.Tensor) -> None:
    """Those of the input and of the parameters."""
    found = []
    for function in (run, model):
        result = function(x)
        upstream = torch.linspace(-1, 2, result.numel()).reshape(result.shape)
        found.append(torch.autograd.grad(result, [x, *model.parameters()], upstream))
    torch.testing.assert_close(*found)


CONVOLVED = {
    "an image": (lambda: torch.nn.Conv2d(3, 4, 3, 2, 1), (9, 8)),
    "patches": (lambda: torch.nn.Conv2d(3, 4, 2, 2), (9, 8)),
    "each channel": (lambda: torch.nn.Conv2d(3, 6, 3, groups=3), (9, 8)),
    "by a large kernel": (lambda: torch.nn.Conv2d(3, 4, 9), (9, 10)),
    "a sequence": (lambda: torch.nn.Conv1d(3, 4, 3, padding=1), (9,)),
    "backwards": (lambda: torch.nn.ConvTranspose2d(3, 4, 3, 2, 1), (5, 4)),
    "backwards, each channel": (lambda: torch.nn.ConvTranspose1d(3, 3, 3, 2, groups=3), (5,)),
}


@pytest.mark.parametrize("batches", [(2, 3, 5), (0,)], ids=str)
@pytest.mark.parametrize("case", CONVOLVED.values(), ids=CONVOLVED)
def test_gradients_of_a_convolution_are_eagers_for_any_batch(case, batches) -> None:
    """Also where the last batch of an epoch is a smaller one, or none is left."""
    make, sizes = case
    model = make()
    run = compiled(model, "onnxrt", min_coverage=0.0)
    for batch in batches:
        x = r(batch, 3, *sizes).requires_grad_()
        if batch:
            torch._dynamo.mark_dynamic(x, 0)
        assert_gradients_are_eagers(run, model, x)
    (report,) = composer.reports()
    if batches[0]:
        attempt = report.attempts[0]
        assert (report.chosen, attempt.coverage) == ("onnxrt", 1.0), attempt.message


ALONG = {
    "a sequence": torch.nn.Conv1d(4, 6, 3, padding=1),
    "each channel, of what was before": torch.nn.Conv1d(4, 4, 3, padding=2, groups=4),
    "far apart": torch.nn.Conv1d(4, 6, 3, dilation=2, groups=2),
    "backwards": torch.nn.ConvTranspose1d(4, 6, 3, padding=1),
    "points": torch.nn.Conv1d(4, 6, 1),
}


@pytest.mark.parametrize("model", ALONG.values(), ids=ALONG)
def test_gradients_of_a_convolution_are_eagers_for_any_length(model) -> None:
    """Sequences of a batch are padded to its longest one."""
    run = compiled(model, "onnxrt", dynamic=True, min_coverage=1.0)
    for length in (7, 9, 12):
        assert_gradients_are_eagers(run, model, r(3, 4, length).requires_grad_())
    (report,) = composer.reports()
    assert report.chosen == "onnxrt", report.attempts[0].message


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_gradient_without_memory_is_zero(dynamic: bool) -> None:
    """Torch says by a tensor without memory that a derivative is nothing: here that of ``sgn``."""
    x = r(4).requires_grad_()
    sine = compiled(lambda x: torch.sgn(x) + torch.sin(x), "onnxrt", dynamic=dynamic)
    (found,) = torch.autograd.grad(torch.sgn(sine(x)).sum(), x)
    assert not found.any()
    (found,) = torch.autograd.grad(sine(x).sum(), x)
    torch.testing.assert_close(found, x.cos())
    assert last().chosen == "onnxrt"


def test_a_gradient_with_a_negative_bit_is_read_as_negative() -> None:
    """Torch negates the imaginary part of a conjugate by a bit, not in memory."""
    x = r(1).requires_grad_()
    y = compiled(torch.sin, "onnxrt")(x)
    upstream = torch.tensor([1 + 2j]).conj().imag
    assert upstream.is_neg()
    (found,) = torch.autograd.grad(y, x, upstream)
    torch.testing.assert_close(found, -2 * x.cos())


def test_an_input_with_a_negative_bit_is_read_as_negative() -> None:
    """It is left to eager."""
    x = torch.tensor([1 + 2j]).conj().imag
    with torch.no_grad():
        torch.testing.assert_close(compiled(lambda x: x * 2, "onnxrt")(x), torch.tensor([-4.0]))
    assert last().chosen == "eager"


def test_training_an_lstm_that_dynamo_may_trace_is_left_to_eager() -> None:
    """Torch's own kernel of its backward would end the process."""
    model, x = torch.nn.LSTM(3, 2), torch.randn(5, 1, 3)
    with torch._dynamo.config.patch(allow_rnn=True):
        y, _ = compiled(model, "onnxrt")(x)
    torch.testing.assert_close(y, model(x)[0])
    y.sum().backward()
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_op")
    assert "mkldnn_rnn_layer_backward" in attempt.message


def test_mean_pooling_by_a_huge_kernel_is_as_large_as_its_input() -> None:
    """EfficientNet pools maps of seven rows by a kernel of 1,280, all of which took gigabytes."""
    arguments = ([1280] * 2, [1280] * 2, [0] * 2, True, True, None)
    backward = lambda grad, x: avg_pool_backward(2)(grad, x, *arguments)  # noqa: E731
    traced = make_fx(backward)(r(1, 8, 1, 1), r(1, 8, 7, 7))
    largest = max(
        value_of(node).numel() for node in traced.graph.nodes if value_of(node) is not None
    )
    assert largest == 8 * 7 * 7


def test_a_scatter_of_as_many_as_the_data_tell_stays_one_operator() -> None:
    """It is torch's in any case; written out it would be several of torch's."""

    def scattered(x, w):
        above = x.detach() > 0
        return x.tanh().masked_scatter(above, (x * w)[above] * 2).sum()

    given = [r(4, 5).requires_grad_(), r(5).requires_grad_()]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        result = compiled(scattered, "onnxrt", min_coverage=0.0)(*given)
        found = torch.autograd.grad(result, given)
    torch.testing.assert_close(found, torch.autograd.grad(scattered(*given), given))
    left = {line.partition(" ")[0] for line in last().attempts[0].engine["left_to_torch"]}
    assert "aten.masked_scatter_backward.default" in left
    assert "aten.scatter.src" not in left
