"""Which programs an engine computes wrongly where sizes of different axes coincide.

A fusion may tell axes by their sizes, or may take two tensors of one shape for one layout. Such a
fault shows only where, for example, a sequence is as long as there are heads. The usual forms of
attention, norms, pools and products of matrices are run by each engine over sizes that coincide,
with fixed and with dynamic sizes, and compared with eager. Run from anywhere, with composer
installed::

    python bench/coinciding.py --engines onnxrt,openvino

The exit status is 1 if any program is wrong, or is refused by the engine.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from differences import difference

import composer

ENGINES = "onnxrt,openvino,inductor"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a program: batch, length of the sequence, heads, and elements of a head."""

    batch: int
    length: int
    heads: int
    width: int

    def __str__(self) -> str:
        return f"batch {self.batch}, length {self.length}, heads {self.heads}, width {self.width}"


Program = Callable[[torch.Tensor, Sizes], torch.Tensor]
"""A function of one tensor of shape (batch, length, heads * width)."""


class Over(torch.nn.Module):
    """A program with its sizes, which are numbers in its graph, as those of a model are."""

    def __init__(self, program: Program, sizes: Sizes) -> None:
        super().__init__()
        self.program = program
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the program."""
        return self.program(x, self.sizes)


APART = Sizes(2, 12, 4, 16)
COINCIDING = (
    Sizes(2, 8, 8, 16),  # length and heads
    Sizes(2, 8, 4, 16),  # length and batch * heads
    Sizes(2, 16, 8, 16),  # half of the length and heads
    Sizes(4, 12, 4, 16),  # batch and heads
    Sizes(12, 12, 4, 16),  # batch and length
    Sizes(2, 16, 4, 16),  # length and width
    Sizes(2, 12, 16, 16),  # heads and width
    Sizes(16, 12, 4, 16),  # batch and width
    Sizes(8, 8, 8, 16),  # all but the width
    Sizes(8, 8, 8, 8),
    Sizes(2, 8, 8, 1),  # one element a head
    Sizes(2, 32, 2, 16),  # length and heads * width
    Sizes(12, 4, 3, 4),  # batch and heads * width, length and width
    Sizes(1, 8, 8, 16),  # one sequence
)
"""Each comment names what coincides."""


def heads_of(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The heads of rows, of shape (batch, heads, length, width)."""
    return x.unflatten(-1, (sizes.heads, sizes.width)).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by hand."""
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


def joined(rows: torch.Tensor) -> torch.Tensor:
    """The heads side by side again."""
    return rows.transpose(1, 2).flatten(2)


def three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, all computed and different."""
    return x.sin(), (x * 2).cos(), x * x.tanh()


def wide(x: torch.Tensor) -> torch.Tensor:
    """The same side by side."""
    return torch.cat(three(x), dim=-1)


def packed(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """As timm's vision transformers: one tensor of queries, keys and values, permuted."""
    parts = wide(x).unflatten(-1, (3, sizes.heads, sizes.width)).permute(2, 0, 3, 1, 4)
    return joined(attend(*parts.unbind(0)))


def packed_and_scaled(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The same with scaled queries."""
    parts = wide(x).unflatten(-1, (3, sizes.heads, sizes.width)).permute(2, 0, 3, 1, 4)
    q, k, v = parts.unbind(0)
    return joined((q * 0.25 @ k.mT).softmax(-1) @ v)


def packed_by_torch(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The same by torch's own operator."""
    parts = wide(x).unflatten(-1, (3, sizes.heads, sizes.width)).permute(2, 0, 3, 1, 4)
    return joined(F.scaled_dot_product_attention(*parts.unbind(0)))


def separate(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Three tensors, each with heads of its own."""
    q, k, v = (heads_of(each, sizes) for each in three(x))
    return joined(attend(q, k, v))


def split(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Three parts of one tensor, each with heads of its own."""
    q, k, v = (heads_of(each, sizes) for each in wide(x).chunk(3, dim=-1))
    return joined(attend(q, k, v))


def separate_by_torch(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The same by torch's own operator."""
    q, k, v = (heads_of(each, sizes) for each in three(x))
    return joined(F.scaled_dot_product_attention(q, k, v))


def apart(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Heads that stay apart."""
    q, k, v = (heads_of(each, sizes) for each in three(x))
    return attend(q, k, v)


def cross(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Queries of one sequence, keys and values of one that is twice as long."""
    twice = torch.cat([x, x.cos()], dim=1)
    keys, values = (heads_of(each, sizes) for each in (twice.sin(), twice.tanh()))
    return joined(attend(heads_of(x * 0.5, sizes), keys, values))


def grouped(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """As many key heads as one, for all queries."""
    q = heads_of(x.sin(), sizes)
    one = x[..., : sizes.width].unsqueeze(1)
    keys, values = (each.expand(-1, sizes.heads, -1, -1) for each in (one.cos(), one.tanh()))
    return joined(attend(q, keys, values))


def masked(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """A causal mask that is added."""
    q, k, v = (heads_of(each, sizes) for each in three(x))
    hidden = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
    return joined((q @ k.mT * 0.25 + hidden).softmax(-1) @ v)


def masked_by_torch(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """A causal mask by torch's own operator."""
    q, k, v = (heads_of(each, sizes) for each in three(x))
    return joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def windowed(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """As Swin: windows of half the sequence."""
    windows = x.unflatten(1, (2, -1)).flatten(0, 1)
    return packed(windows, sizes).unflatten(0, (-1, 2)).flatten(1, 2)


def length_first(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """As ``nn.MultiheadAttention``: the length is first, batch and heads are one axis."""
    batch = x.shape[0] * sizes.heads
    rows = three(x.transpose(0, 1).contiguous())
    q, k, v = (each.reshape(each.shape[0], batch, sizes.width).transpose(0, 1) for each in rows)
    return attend(q, k, v).transpose(0, 1).reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)


def turned(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Queries with the batch first, and a result with the length first."""
    q, k, v = (heads_of(each, sizes) for each in three(x))
    return attend(q, k, v).permute(2, 0, 1, 3).flatten(2)


def without_softmax(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """As linear transformers."""
    q, k, v = (heads_of(each, sizes) for each in three(x))
    return joined((q @ k.mT).relu() @ v)


def over_channels(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """As XCiT: attention between the elements of heads."""
    q, k, v = (heads_of(each, sizes).mT for each in three(x))
    return attend(q, k, v).permute(0, 3, 1, 2).flatten(2)


def images_of(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Images, of shape (batch, heads, length, width)."""
    return heads_of(x, sizes).contiguous()


def norms(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Norms over every axis, by hand and by torch's own operators."""
    image = images_of(x, sizes)
    found = [F.layer_norm(image, image.shape[-1:]), F.instance_norm(image)]
    found += [F.group_norm(image, 1), F.normalize(image, dim=1)]
    for axis in range(-1, -5, -1):
        mean = image.mean(axis, keepdim=True)
        variance = image.var(axis, correction=0, keepdim=True)
        found.append((image - mean) / (variance + 1).sqrt())
        found.append(image.softmax(axis))
    return torch.cat(found)


def pools(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Pools over the images, and over transposed images."""
    image = F.pad(images_of(x, sizes), (1, 1, 1, 1))
    found = [F.avg_pool2d(each, 2, 1).flatten(1) for each in (image, image.mT)]
    found += [F.max_pool2d(each, 2, 1).flatten(1) for each in (image, image.transpose(1, 2))]
    found += [image.mean((2, 3)), image.mean((1, 2)), image.amax(1).flatten(1)]
    return torch.cat(found, dim=-1)


def means_without_axes(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Means that lose an axis and are broadcast along another one, where that is possible."""
    rows = x[0, : min(x.shape[1:]), : min(x.shape[1:])]
    return torch.stack([rows - rows.mean(-1), rows / rows.pow(2).sum(0), rows.T - rows.amax(-1)])


def products(x: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Products of computed matrices, also transposed, with operands of one element for a row."""
    image = images_of(x, sizes).sin()
    rows = image @ image.mT
    columns = image.mT @ image
    scaled = (rows * image.mean(-1, keepdim=True)).relu() @ image
    turned = (columns + image.mean(-2).unsqueeze(-1)).transpose(1, 2)
    return torch.cat([rows.flatten(1), scaled.flatten(1), turned.flatten(1)], dim=-1)


PROGRAMS: dict[str, Program] = {
    each.__name__: each
    for each in (
        *(packed, packed_and_scaled, packed_by_torch, split, separate, separate_by_torch, apart),
        *(cross, grouped, masked, masked_by_torch, windowed, length_first, turned),
        *(without_softmax, over_channels, norms, pools, means_without_axes, products),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if any program is wrong or refused."""
    options = parse(arguments)
    logging.disable(logging.WARNING)
    wrong = 0
    for engine, name in itertools.product(options.engines.split(","), options.programs.split(",")):
        for said in problems(engine, PROGRAMS[name]):
            wrong += 1
            print(f"{engine} {name}, {said}", flush=True)
        print(f"{engine} {name}: done", flush=True)
    print(f"{wrong} wrong or refused")
    return int(wrong > 0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Programs over sizes that coincide.")
    parser.add_argument("--engines", default=ENGINES, metavar="A,B", help=f"default: {ENGINES}")
    names = ",".join(PROGRAMS)
    parser.add_argument("--programs", default=names, metavar="A,B", help="default: all")
    return parser.parse_args(arguments)


def problems(engine: str, program: Program) -> Iterator[str]:
    """Where an engine is wrong or refuses, in words."""
    for sizes, dynamic in itertools.product((APART, *COINCIDING), (False, True)):
        said = problem(engine, program, sizes, dynamic=dynamic)
        if said:
            yield f"{'dynamic' if dynamic else 'fixed'} sizes, {sizes}: {said}"


def problem(engine: str, program: Program, sizes: Sizes, *, dynamic: bool) -> str:
    """How the result of an engine differs from eager's; empty if it does not."""
    torch.compiler.reset()
    options = {"chain": [engine], "verify": "off"}
    module = Over(program, sizes)
    run = torch.compile(module, backend="composer", options=options, dynamic=dynamic)
    torch.manual_seed(0)
    x = torch.randn(sizes.batch, sizes.length, sizes.heads * sizes.width)
    with torch.no_grad():
        expected = module(x)
        found = run(x)
    report = composer.reports()[-1]
    if report.chosen != engine:
        return f"refused: {report.attempts[0].message}"
    return difference(expected, found)


if __name__ == "__main__":
    sys.exit(main())
