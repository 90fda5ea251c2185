"""Which small graphs end the process on an engine, or are computed wrongly there.

Each seed is a graph of up to eight operators over tensors of up to four dimensions, with sizes of
0, 1, a few, and some hundreds. The graphs run in a child process; when it dies, the graph is shown
and another child goes on. Run from anywhere, with composer installed::

    python bench/fuzz.py --engines openvino --seeds 0-400
    python bench/fuzz.py --engines openvino --seeds 17-18 --here

The exit status is 1 if a graph ends the process, hangs, or is wrong.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from ops import ending, outcome

import composer

ENGINES = "onnxrt,openvino"
SIZES = (0, 1, 1, 1, 2, 3, 4, 7, 8, 16, 33, 300)
MOST_ELEMENTS = 1 << 20
LARGEST = 1e4
"""Graphs with larger numbers are left out: what differs there is mostly rounding."""
LONGEST, TRIES = 8, 60
CLOSE = 2e-3
"""Of the largest number, how much a result may be off."""

Tensor = torch.Tensor
Call = Callable[..., Tensor]
Maker = Callable[[random.Random, Tensor], Call]
"""Gives an operator the arguments that fit a tensor; torch refuses those that do not."""


def plain(call: Call) -> Maker:
    """An operator without further arguments."""
    return lambda draw, x: call


def along(call: Call) -> Maker:
    """An operator along one dimension."""
    return lambda draw, x: functools.partial(call, dim=draw.randrange(max(x.dim(), 1)))


def reduced(call: Call) -> Maker:
    """A reduction over one dimension, the last two, or all."""

    def make(draw: random.Random, x: Tensor) -> Call:
        axes = draw.choice([[draw.randrange(max(x.dim(), 1))], [-1, -2], [*range(x.dim())]])
        return functools.partial(call, dim=axes, keepdim=draw.random() < 0.5)

    return make


def reshaped(draw: random.Random, x: Tensor) -> Call:
    """A reshape to some dimensions, none included."""
    shapes = [[-1], [1, -1], [-1, 1], [*x.shape, 1], [1, *x.shape], [*x.shape[::-1]]]
    shapes += [[], [1], [1, 1]] if x.numel() == 1 else []
    return functools.partial(torch.reshape, shape=draw.choice(shapes))


def permuted(draw: random.Random, x: Tensor) -> Call:
    """The dimensions in another order."""
    return functools.partial(torch.permute, dims=draw.sample(range(x.dim()), x.dim()))


def expanded(draw: random.Random, x: Tensor) -> Call:
    """Dimensions of size one repeated, and a new one."""
    sizes = [draw.choice(SIZES), *(draw.choice(SIZES) if n == 1 else n for n in x.shape)]
    return lambda x: x.expand(sizes)


def sliced(draw: random.Random, x: Tensor) -> Call:
    """A part, which may be empty."""
    axis = draw.randrange(max(x.dim(), 1))
    begin, end, step = draw.randrange(4), draw.randrange(9), draw.choice([1, 1, 2])
    return lambda x: x[(slice(None),) * axis + (slice(begin, end, step),)]


def last(draw: random.Random, x: Tensor) -> Call:
    """One index of one dimension."""
    return functools.partial(torch.select, dim=draw.randrange(max(x.dim(), 1)), index=-1)


def padded(draw: random.Random, x: Tensor) -> Call:
    """Zeros around the last two dimensions, or rows taken away."""
    return functools.partial(F.pad, pad=[draw.randrange(-1, 3) for _ in range(4)])


def linear(draw: random.Random, x: Tensor) -> Call:
    """A layer of random weights."""
    rows, columns = draw.choice([1, 1, 2, 8, 33]), x.shape[-1] if x.dim() else 1
    bias = torch.randn(rows) if draw.random() < 0.5 else None
    return functools.partial(F.linear, weight=torch.randn(rows, columns) / 4, bias=bias)


def convolved(draw: random.Random, x: Tensor) -> Call:
    """A convolution over one or two dimensions."""
    kernel = [draw.choice([1, 1, 2, 3]) for _ in range(x.dim() - 2)]
    weight = torch.randn(draw.choice([1, 2, 8]), x.shape[1], *kernel) / 4
    call = F.conv1d if x.dim() == 3 else F.conv2d
    return functools.partial(
        call, weight=weight, stride=draw.choice([1, 2]), padding=draw.randrange(2)
    )


def pooled(call: Any) -> Maker:
    """A pool of random windows."""

    def make(draw: random.Random, x: Tensor) -> Call:
        window, ceil = draw.choice([1, 2, 3]), draw.random() < 0.3
        step, padding = draw.choice([1, 2]), draw.randrange(2)
        return functools.partial(
            call, kernel_size=window, stride=step, padding=padding, ceil_mode=ceil
        )

    return make


def normed(draw: random.Random, x: Tensor) -> Call:
    """A norm over the last dimensions."""
    return functools.partial(F.layer_norm, normalized_shape=x.shape[-draw.choice([1, 2]) :])


def grouped(draw: random.Random, x: Tensor) -> Call:
    """A norm over groups of channels."""
    return functools.partial(F.group_norm, num_groups=draw.choice([1, x.shape[1]]))


def looked_up(draw: random.Random, x: Tensor) -> Call:
    """Rows at some positions."""
    positions = torch.tensor([draw.randrange(max(x.shape[0], 1)) for _ in range(draw.randrange(4))])
    return functools.partial(torch.index_select, dim=0, index=positions.long())


def rolled(draw: random.Random, x: Tensor) -> Call:
    """A roll along one dimension."""
    axis = draw.randrange(max(x.dim(), 1))
    return functools.partial(torch.roll, shifts=draw.randrange(-2, 3), dims=axis)


def resized(draw: random.Random, x: Tensor) -> Call:
    """An image of another size."""
    mode = draw.choice(["nearest", "bilinear"])
    return functools.partial(F.interpolate, scale_factor=draw.choice([0.5, 2]), mode=mode)


def pooled_to(draw: random.Random, x: Tensor) -> Call:
    """An average image of this size."""
    return functools.partial(F.adaptive_avg_pool2d, output_size=draw.choice([1, 2]))


ELEMENTWISE: tuple[Call, ...] = (
    *(torch.relu, torch.sigmoid, torch.tanh, torch.neg, torch.abs, torch.sin, torch.erf, F.gelu),
    *(F.silu, F.softplus, F.elu, F.hardswish, F.mish, torch.square, torch.floor, torch.round),
    *(lambda x: x * 2 + 1, lambda x: 1 / (1 + x * x), lambda x: x.clamp(-0.5, 0.5)),
    *(lambda x: torch.where(x > 0, x, x * 0.1), lambda x: (x.abs() + 0.1).log()),
    *(lambda x: (x.abs() + 0.1).rsqrt(), lambda x: x.detach().exp().clamp(0, 9), torch.clone),
)
MOVES: tuple[Maker, ...] = (
    *(reshaped, reshaped, permuted, expanded, sliced, last, padded, looked_up, rolled),
    *(along(torch.unsqueeze), along(torch.squeeze), plain(torch.squeeze), plain(torch.flatten)),
    *(plain(lambda x: x.mT), plain(torch.ravel)),
)
ONE_OPERAND: tuple[Maker, ...] = (
    *map(plain, ELEMENTWISE),
    *MOVES,
    *MOVES,
    *map(reduced, (torch.sum, torch.mean, torch.amax, torch.amin, torch.var, torch.logsumexp)),
    *map(along, (torch.softmax, torch.log_softmax, torch.cumsum, F.normalize)),
    *(linear, linear, linear, convolved, convolved, normed, grouped, resized, pooled_to),
    *map(pooled, (F.max_pool2d, F.avg_pool2d, F.max_pool1d, F.avg_pool1d)),
)
TWO_OPERANDS: tuple[Call, ...] = (
    *(torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: a / (b.abs() + 1)),
    *(torch.matmul, torch.matmul, lambda a, b: torch.matmul(a, b.mT), F.linear),
    *(lambda a, b: torch.einsum("...i,...i->...", a, b), lambda a, b: (a * b).sum()),
    *(lambda a, b: torch.einsum("bi,bi->", a, b), lambda a, b: torch.einsum("ij,j->", a, b)),
    *(lambda a, b: torch.cat([a, b]), lambda a, b: torch.cat([a, b], -1)),
    *(lambda a, b: torch.stack([a, b]), lambda a, b: torch.where(a > b, a, b)),
    *(lambda a, b: F.scaled_dot_product_attention(a, b, b), lambda a, b: a.expand_as(b)),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One call: what is called, and which of the values so far it reads."""

    call: Call
    reads: tuple[int, ...]


@dataclass(slots=True)
class Graph:
    """A random program, and the inputs that it was made for."""

    inputs: list[Tensor]
    dynamic: bool
    steps: list[Step] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the last two values."""
        values = [*inputs]
        for step in self.steps:
            values.append(step.call(*(values[i] for i in step.reads)))
        return tuple(values[-2:])


def graph_of(seed: int) -> Graph:
    """The graph of a seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    inputs = [torch.randn(sizes_of(draw)) for _ in range(draw.choice([1, 2, 2]))]
    graph = Graph(inputs, dynamic=draw.random() < 0.4)
    graph.shown += [f"{i}: input {[*each.shape]}" for i, each in enumerate(inputs)]
    values, length = [*inputs], draw.randint(1, LONGEST)
    for _ in range(TRIES):
        if len(graph.steps) == length:
            break
        step = outcome(step_of, draw, values)
        found = step if isinstance(step, Exception) else outcome(value_of, step, values)
        if isinstance(found, Tensor) and is_moderate(found):
            graph.shown.append(f"{len(values)}: {name_of(step.call)} {step.reads} {[*found.shape]}")
            graph.steps.append(step)
            values.append(found)
    return graph


def sizes_of(draw: random.Random) -> list[int]:
    """The sizes of an input; of those that are large, one."""
    sizes = [draw.choice(SIZES) for _ in range(draw.choice([0, 1, 2, 2, 3, 3, 4]))]
    return sizes if math.prod(sizes) < MOST_ELEMENTS // 8 else [min(each, 8) for each in sizes]


def step_of(draw: random.Random, values: Sequence[Tensor]) -> Step:
    """A call of an operator with some of the values, mostly the last."""
    ours = draw.choice([len(values) - 1, len(values) - 1, draw.randrange(len(values))])
    if draw.random() < 0.3:
        return Step(draw.choice(TWO_OPERANDS), (ours, draw.randrange(len(values))))
    return Step(draw.choice(ONE_OPERAND)(draw, values[ours]), (ours,))


def value_of(step: Step, values: Sequence[Tensor]) -> Tensor:
    """What a call returns in eager."""
    return step.call(*(values[i] for i in step.reads))


def is_moderate(value: Tensor) -> bool:
    """Whether a value has a moderate number of elements, and of moderate size."""
    if value.numel() > MOST_ELEMENTS or not value.is_floating_point():
        return False
    return not value.numel() or bool(value.isfinite().all() and value.abs().max() < LARGEST)


def name_of(call: Any) -> str:
    """An operator, or the line in which it is written, with its arguments."""
    if isinstance(call, functools.partial):
        said = {key: brief(value) for key, value in call.keywords.items()}
        return f"{name_of(call.func)} {said}"
    where = f"(line {call.__code__.co_firstlineno})" if call.__name__ == "<lambda>" else ""
    return f"{call.__name__}{where}"


def brief(value: Any) -> Any:
    """A tensor by its shape."""
    return [*value.shape] if isinstance(value, Tensor) else value


# --- the process that runs graphs ---------------------------------------------------------------


def work(engine: str, seeds: range) -> None:
    """Run graphs, with a line when each begins, and one for each that is wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    composer.configure({"cache": {"artefacts": 0}})  # for thousands of graphs, each run once
    for seed in seeds:
        print(f"at {seed}", flush=True)
        print(f"{seed}: {verdict(engine, seed)}", flush=True)


@torch.no_grad()
def verdict(engine: str, seed: int) -> str:
    """What an engine made of a graph: right, refused, or how it is wrong."""
    torch.compiler.reset()
    composer.reset()
    graph = graph_of(seed)
    options = {"chain": [engine], "verify": "off", "min_coverage": 0.0}
    program = lambda *inputs: graph(*inputs)  # noqa: E731  # each with a code object of its own
    run = torch.compile(program, backend="composer", options=options, dynamic=graph.dynamic)
    expected, found = outcome(graph, *graph.inputs), outcome(run, *graph.inputs)
    reports = composer.reports()
    if isinstance(found, Exception):
        return f"WRONG: {type(found).__name__}: {found}"
    if said := unlike(expected, found):
        return f"WRONG: {said}"
    return "right" if reports and reports[-1].chosen == engine else "refused"


def unlike(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """How results differ; empty if they do not."""
    for theirs, ours in zip(expected, found, strict=True):
        if theirs.shape != ours.shape:
            return f"shape {[*ours.shape]}, not {[*theirs.shape]}"
        if not theirs.numel():
            continue
        error = (theirs - ours).abs().max()
        if not error <= CLOSE * theirs.abs().max() + CLOSE / 10:
            return f"off by {error:.2g} of {theirs.abs().max():.2g}"
    return ""


# --- the process that watches -------------------------------------------------------------------


def watch(engine: str, seeds: range, limit: float) -> Iterator[tuple[int, str]]:
    """What became of each graph, also of those that end the process that runs them."""
    first = seeds.start
    while first < seeds.stop:
        command = [sys.executable, __file__, "--engines", engine, "--here"]
        command += ["--seeds", f"{first}-{seeds.stop}"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        watchdog = threading.Timer(math.inf, process.kill)
        at = first
        with process:
            for line in process.stdout or ():
                watchdog.cancel()
                watchdog = threading.Timer(limit, process.kill)
                watchdog.start()
                if line.startswith("at "):
                    at = int(line.removeprefix("at "))
                else:
                    seed, _, said = line.strip().partition(": ")
                    yield int(seed), said
        watchdog.cancel()
        if not process.returncode:
            return
        yield at, f"CRASHED: {ending(process.returncode, limit)}"
        first = at + 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if a graph ends the process, hangs, or is wrong."""
    options = parse(arguments)
    seeds = range(*map(int, options.seeds.split("-")))
    failed = 0
    for engine in options.engines.split(","):
        if options.here:
            work(engine, seeds)
            continue
        counts = {"right": 0, "refused": 0}
        for seed, said in watch(engine, seeds, options.limit):
            if said in counts:
                counts[said] += 1
                continue
            failed += 1
            graph = graph_of(seed)
            kind = "dynamic" if graph.dynamic else "fixed"
            print(f"{engine} {seed}, {kind} sizes: {said}", *graph.shown, sep="\n    ", flush=True)
        print(f"{engine}: {counts['right']} right, {counts['refused']} refused", flush=True)
    return int(failed > 0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Random small graphs on engines.")
    parser.add_argument("--engines", default=ENGINES, metavar="A,B", help=f"default: {ENGINES}")
    parser.add_argument("--seeds", default="0-1000", metavar="A-B", help="from A to before B")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a graph (120)")
    parser.add_argument("--here", action="store_true", help="in this process, with each verdict")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
