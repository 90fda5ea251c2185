"""What ONNX Runtime's optimizer rounds, or makes models of that it refuses: taken without it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, fault_of, last, upstream

from composer.backends.onnxrt import session
from composer.errors import FallbackWarning

pytest.importorskip("onnxruntime", reason="the engine itself")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]


def padded(pool, *pads):
    """An average over zeros that surround an image."""
    return lambda x, y: pool(F.pad(x, pads)) * y.sum()


def scaled_twice(x, y):
    """Products read it after both."""
    once = x * 0.6
    return (once * 0.5 @ y.mT) @ (once @ y)


REFUSED = {
    "zeros as many as the kernel is wide": padded(lambda x: F.avg_pool2d(x, 2), 0, 2, 0, 2),
    "zeros twice": padded(lambda x: F.avg_pool2d(x, 2, padding=1), 1, 0, 1, 0),
    "zeros and a last window": padded(lambda x: F.avg_pool2d(x, 2, ceil_mode=True), 0, 1, 0, 1),
    "a number, and another": scaled_twice,
    "quotients": lambda x, y: (x / 3 / 2).mT @ y @ (x / 3 @ y),
    "what is multiplied as well": lambda x, y: (x * 0.6 * 0.5 @ y) @ (x * 0.6),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_what_an_optimizer_breaks_is_taken_without_it(function, dtype, dynamic) -> None:
    """The rest of the optimizer is asked."""
    given = torch.randn(2, 2, 3, 4, 4, dtype=dtype)
    found = compiled(function, "onnxrt", dynamic=dynamic)(*given)
    torch.testing.assert_close(found, function(*given), rtol=2e-2, atol=2e-2)
    assert (last().chosen, last().attempts[0].coverage) == ("onnxrt", 1.0)


@upstream
@pytest.mark.parametrize("name", REFUSED)
def test_onnx_runtime_breaks_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule may go when no supported release does so any more."""
    monkeypatch.setattr(session, "optimizers_to_disable", lambda model: ())
    with fault_of("onnxruntime", before="1.32" if "zeros" in name else None):
        with pytest.warns(FallbackWarning):
            compiled(REFUSED[name], "onnxrt")(*torch.randn(2, 2, 3, 4, 4))
        assert last().chosen != "onnxrt"


def scaled_products(x, y):
    return (x * 0.1) @ y, x @ y / 0.3, (x / 0.7) @ (y * 0.9)


def test_a_scaled_product_keeps_the_digits_of_float64() -> None:
    """The factors are not made an attribute of the product, which is of float32."""
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    results = compiled(scaled_products, "onnxrt")(x, y)
    torch.testing.assert_close(results, scaled_products(x, y), rtol=1e-12, atol=1e-12)
    assert last().chosen == "onnxrt"


@upstream
def test_onnxruntime_still_rounds_the_factors_of_products(monkeypatch) -> None:
    """The rule can go once this fails."""
    monkeypatch.setattr(session, "optimizers_to_disable", lambda model: ())
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    results = compiled(scaled_products, "onnxrt")(x, y)
    with fault_of("onnxruntime", before="1.32"):
        for result, expected in zip(results, scaled_products(x, y), strict=True):
            assert ((result - expected).abs() / expected.abs()).median() > 1e-10
