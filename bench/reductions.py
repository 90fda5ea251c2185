"""How far reductions are from float64: by engine, number of elements and offset.

    python bench/reductions.py                                  # all of it, about an hour
    python bench/reductions.py --engines openvino --cases mean,dot --powers 8,16,22
    python bench/reductions.py --powers 8,12,22 --kinds 1000,equal --json out.json

Each case computes on the same numbers in eager, on the engine and in float64. Its error is the
largest difference from float64, over the largest number of the result. An engine may be as far off
as four times eager's error, or four times four roundings of float32, where eager is closer than
that. The table has a line for each case and engine, and what is further off is marked. The file has
the same figures, with ``null`` for an infinite error.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from markdown_table import table
from timing import machine, write_json
from torch.nn import functional

import composer

Case = Callable[..., Any]

LIMIT = 4
"""How many times eager's error an engine's may be."""

ROUNDINGS = 2**-21
"""What eager's error is taken for at least: four roundings."""

ROW = 4
"""The length of a row, where the elements are summed by columns."""


def _columns(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, ROW)


def _image(x: torch.Tensor) -> torch.Tensor:
    """One channel of the elements, in rows of 16."""
    return x.view(1, 1, -1, 16)


def _channels(x: torch.Tensor) -> torch.Tensor:
    """Two channels of which each has half of the elements."""
    return x.view(1, 2, -1, 16)


FORWARD: dict[str, Case] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "mean of columns": lambda x: _columns(x).mean(0),
    "mean of an image": lambda x: _image(x).mean((2, 3)),
    "var": lambda x: x.var(),
    "var of columns": lambda x: _columns(x).var(0),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "norm 3": lambda x: x.norm(3),
    "mse_loss": lambda x: functional.mse_loss(x, x.flip(0) * 2),
    "l1_loss": lambda x: functional.l1_loss(x, x * 2),
    "smooth_l1_loss": lambda x: functional.smooth_l1_loss(x, x * 2),
    "huber_loss": lambda x: functional.huber_loss(x, x * 2),
    "bce": lambda x: functional.binary_cross_entropy(x.sigmoid(), x.sigmoid() * 0.5),
    "bce with logits": lambda x: functional.binary_cross_entropy_with_logits(x, x * 0.5),
    "kl_div": lambda x: functional.kl_div(-x, x * 0.5),
    "cross_entropy": lambda x: functional.cross_entropy(_columns(x), _columns(x).argmax(1)),
    "adaptive_avg_pool1d": lambda x: functional.adaptive_avg_pool1d(x.view(1, 1, -1), 1),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(_image(x), 1),
    "adaptive_avg_pool2d to 2": lambda x: functional.adaptive_avg_pool2d(_image(x), 2),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0),
    "softmax of columns": lambda x: _columns(x).softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape),
    "group_norm": lambda x: functional.group_norm(_channels(x), 1),
    "instance_norm": lambda x: functional.instance_norm(_channels(x)),
    "batch_norm": lambda x: functional.batch_norm(_channels(x), None, None, training=True),
    "normalize": lambda x: functional.normalize(x, dim=0),
    "cosine_similarity": lambda x: functional.cosine_similarity(x, x.flip(0), dim=0),
    "dot": lambda x: x @ x,
    "vector by matrix": lambda x: _columns(x)[:, 0] @ _columns(x),
    "matrix by matrix": lambda x: _columns(x).T @ _columns(x),
    "matrices": lambda x: torch.bmm(x.view(1, 1, -1), x.view(1, -1, 1)),
    "einsum": lambda x: torch.einsum("bi,bi->", x.view(2, -1), x.view(2, -1)),
    "linear": lambda x: functional.linear(x.view(1, -1), x.view(1, -1)),
}
"""Functions of a vector."""


def _parameters(x: torch.Tensor, *shapes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.full(shape, 0.5, dtype=x.dtype, requires_grad=True) for shape in shapes]


BACKWARD: dict[str, tuple[Case, Sequence[Sequence[int]]]] = {
    "of a bias": (lambda x, b: (_columns(x) + b) * _columns(x), [(ROW,)]),
    "of a factor": (lambda x, w: x * w, [()]),
    "of a linear layer": (
        lambda x, w, b: functional.linear(_columns(x), w, b),
        [(3, ROW), (3,)],
    ),
    "of a convolution": (
        lambda x, w, b: functional.conv2d(_image(x), w, b, padding=1),
        [(2, 1, 3, 3), (2,)],
    ),
    "of layer_norm": (
        lambda x, w, b: functional.layer_norm(_columns(x), (ROW,), w, b),
        [(ROW,), (ROW,)],
    ),
    "of group_norm": (
        lambda x, w, b: functional.group_norm(_channels(x), 1, w, b),
        [(2,), (2,)],
    ),
    "of batch_norm": (
        lambda x, w, b: functional.batch_norm(_channels(x), None, None, w, b, training=True),
        [(2,), (2,)],
    ),
    "of rms_norm": (lambda x, w: functional.rms_norm(_columns(x), (ROW,), w), [(ROW,)]),
    "of prelu": (lambda x, w: functional.prelu(x - 0.5, w), [(1,)]),
    "of mse_loss": (lambda x, w: functional.mse_loss(x * w, x), [()]),
    "of softmax": (lambda x, w: (x * w).softmax(0), [()]),
}
"""Functions of a vector and parameters of these shapes, whose gradients are long sums."""


class Found(NamedTuple):
    """Errors at one size: of eager, and of an engine."""

    eager: float
    engine: float

    @property
    def ratio(self) -> float:
        """The engine's error over eager's."""
        return self.engine / max(self.eager, ROUNDINGS)


def numbers(kind: str, count: int) -> torch.Tensor:
    """``count`` numbers: ``"equal"``, or drawn evenly from the one that begins with an offset."""
    if kind == "equal":
        return torch.full((count,), 0.1)
    return torch.rand(count, generator=torch.Generator().manual_seed(0)) + float(kind)


def forward(function: Case, x: torch.Tensor) -> list[torch.Tensor]:
    """The result of a function."""
    with torch.no_grad():
        return [function(x)]


def backward(
    function: Case, shapes: Sequence[Sequence[int]], x: torch.Tensor
) -> list[torch.Tensor]:
    """The gradients of a function's parameters, for a gradient that has the result's elements."""
    parameters = _parameters(x, *shapes)
    result = function(x, *parameters)
    return list(torch.autograd.grad(result, parameters, torch.full_like(result, 0.1)))


def error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest error among the results, each over the largest number of its result."""
    return max(map(_error, found, exact))


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    scale = exact.abs().max().item()
    if scale < ROUNDINGS:  # a zero, as of the norm of equal numbers
        scale = 1.0
    wrong = ((found.double() - exact).abs().max() / scale).item()
    return wrong if wrong == wrong else float("inf")


def cases() -> dict[str, tuple[Case, Callable[..., list[torch.Tensor]]]]:
    """All functions by name, each with what computes its result from the function and a vector."""
    results: dict[str, Any] = {name: (each, forward) for name, each in FORWARD.items()}
    for name, (function, shapes) in BACKWARD.items():
        of_shapes = lambda f, x, shapes=shapes: backward(f, shapes, x)  # noqa: E731
        results[f"gradients {name}"] = (function, of_shapes)
    return results


class Asked(NamedTuple):
    """What a row of the table is about."""

    case: str
    engine: str
    sizes: str
    kind: str


def measure(asked: Asked, powers: Sequence[int]) -> Iterator[tuple[str, Found]]:
    """Who computes a case at each size, and the errors."""
    function, run = cases()[asked.case]
    is_dynamic = asked.sizes == "dynamic"
    options = {"chain": [asked.engine]}
    torch.compiler.reset()
    compiled = torch.compile(function, backend="composer", dynamic=is_dynamic, options=options)
    for power in powers:
        if not is_dynamic:
            torch.compiler.reset()
        x = numbers(asked.kind, 2**power)
        exact = run(function, x.double())
        eager = error(run(function, x), exact)
        found = error(run(compiled, x), exact)
        yield composer.reports()[-1].chosen, Found(eager, found)


class Row(NamedTuple):
    """Who computed a case, in alphabetical order, and the errors by the power of two."""

    asked: Asked
    chosen: str
    errors: dict[int, Found]

    def cells(self) -> list[str]:
        """The row of the table: at each size the engine's error over eager's."""
        errors = self.errors.values()
        marks = (" **!**" if found.ratio > LIMIT else "" for found in errors)
        texts = (f"{found.engine:.0e} / {found.eager:.0e}" for found in errors)
        return [*self.asked, self.chosen, *map("".join, zip(texts, marks, strict=True))]

    def record(self) -> dict[str, Any]:
        """The row of the file."""
        errors = {
            f"2^{power}": {
                "eager": _finite(found.eager),
                "engine": _finite(found.engine),
                "ratio": _finite(found.ratio),
            }
            for power, found in self.errors.items()
        }
        return {**self.asked._asdict(), "computed by": self.chosen, "errors": errors}


def _finite(number: float) -> float | None:
    return float(f"{number:.3g}") if math.isfinite(number) else None


def row_of(asked: Asked, powers: Sequence[int]) -> Row:
    """The errors of a case at all sizes."""
    chosen: set[str] = set()
    errors: dict[int, Found] = {}
    for power, (who, found) in zip(powers, measure(asked, powers), strict=True):
        chosen.add(who)
        errors[power] = found
    return Row(asked, " ".join(sorted(chosen)), errors)


def main() -> None:
    """Print the table; each row is printed to the error stream as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="onnxrt,openvino")
    parser.add_argument("--cases", default=",".join(cases()))
    parser.add_argument("--powers", default="8,10,12,14,16,18,20,22,24,26")
    parser.add_argument("--kinds", default="0,1000,equal")
    parser.add_argument("--sizes", default="static,dynamic")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    given = parser.parse_args()
    powers = [*map(int, given.powers.split(","))]
    choices = (given.cases, given.engines, given.sizes, given.kinds)
    described = machine(("openvino",))
    rows: list[Row] = []
    for each in itertools.product(*(choice.split(",") for choice in choices)):
        rows.append(row_of(Asked(*each), powers))
        print(*rows[-1].cells(), sep=" | ", file=sys.stderr, flush=True)
        if given.json:
            write_json(given.json, {"machine": described, "rows": [row.record() for row in rows]})
    headings = ["case", "engine", "sizes", "numbers", "computed by"]
    headings += [f"2^{power}" for power in powers]
    print(table(headings, [row.cells() for row in rows], 5))


if __name__ == "__main__":
    main()
