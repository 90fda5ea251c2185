"""Small programs that :func:`composer.passes.check` tries a pass on."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from composer.passes.debug.compare import Program


class Attention(torch.nn.Module):
    """Three products that share an operand, attention, and an output product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute self-attention; input and output have shape ``(batch, length, 8)``."""
        query, key, value = (
            each(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _elementwise(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    product = x @ y
    same = (x @ y).to(x.dtype).contiguous() + 0
    return torch.cos(product).relu() * 1, torch.softmax(same, -1), torch.where(x > 0, x, -y).sum()


def _in_place(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write through a view, and return two views of one tensor."""
    kept = x.clone()
    kept[0].add_(1)
    kept.mul_(2)
    return kept.view(-1), kept.t()


def _random(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)


def _convolution() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Dropout(0.0)
    )


def programs() -> Iterator[tuple[str, Program]]:
    """Yield names and programs. They run on the CPU, with the same random numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        image, matrix, other = torch.randn(2, 3, 6, 6), torch.randn(4, 4), torch.randn(4, 4)
        yield "elementwise", Program(_elementwise, (matrix, other), {})
        yield "convolution", Program(_convolution(), (image,), {})
        yield "convolution_eval", Program(_convolution().eval(), (image,), {})
        yield "attention", Program(Attention(), (torch.randn(2, 5, 8),), {})
        yield "in_place", Program(_in_place, (matrix,), {})
        yield "random", Program(_random, (matrix,), {})
