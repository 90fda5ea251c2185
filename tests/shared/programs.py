"""Random programs of torch's operations for hypothesis: source that runs, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

UNARY = ("sin", "exp", "tanh", "relu", "neg", "abs", "sigmoid", "square", "sign", "floor")
BINARY = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})", "{0} @ {1}")
BINARY += ("{0} < {1} + 0.123", "torch.where({0} > 0.123, {0}, {1})", "torch.atan2({0}, {1})")
REDUCTIONS = ("sum", "mean", "amax", "prod", "cumsum", "argmax", "softmax")
VIEWS = ("{0}.t()", "{0}.reshape(-1)", "{0}[1:]", "{0}[:, ::2]", "{0}.select(0, 0)", "{0}.mT")
VIEWS += ("{0}.unsqueeze(0)", "{0}.unsqueeze(-1).expand(*{0}.shape, 3)", "{0}.squeeze()")
VIEWS += ("{0}.flatten()", "{0}.view(-1)", "{0}[..., -1]", "{0}.diagonal()", "{0}.detach()")
JOINS = ("torch.cat(({0}, {1}))", "torch.stack(({0}, {1}))", "torch.cat(({0}, {1}), dim=-1)")
IN_PLACE = ("{0}.add_({1})", "{0}.mul_({1})", "{0}.copy_({1})", "{0}.zero_()", "{0}[0] = 2")
IN_PLACE += ("{0}.t_()", "{0}.clamp_(min=0)", "{0}.transpose(0, -1).add_(1)")
CASTS = ("{0}.float()", "{0}.double()", "({0} > 0.123)", "{0}.clamp(-9, 9).round().long()")
OTHERS = ("{0}.clone()", "{0}.contiguous()", "torch.zeros_like({0})", "{0} * 0.5", "{0} + 1")

LAYOUTS = ("contiguous", "transposed", "strided", "offset")
SHAPES = ((), (1,), (4,), (0,), (1, 4), (3, 4), (4, 3), (4, 4), (0, 4), (2, 1, 4), (2, 3, 4))


@dataclass(frozen=True, slots=True)
class Given:
    """One input: what it is, and how it lies in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str

    def make(self, generator: torch.Generator, *, grad: bool) -> torch.Tensor:
        """A leaf of multiples of a quarter between -2 and 2, so that sums are exact."""
        value = (torch.randint(-8, 9, self._around(), generator=generator) / 4).to(self.dtype)
        return self._lay(value).requires_grad_(grad and value.is_floating_point())

    def _around(self) -> tuple[int, ...]:
        if self.layout == "transposed":
            return self.shape[::-1]
        if self.layout == "strided" and self.shape:
            return (*self.shape[:-1], self.shape[-1] * 2)
        if self.layout == "offset" and self.shape:
            return (self.shape[0] + 1, *self.shape[1:])
        return self.shape

    def _lay(self, value: torch.Tensor) -> torch.Tensor:
        if self.layout == "transposed":
            return value.permute(tuple(reversed(range(value.dim()))))
        if self.layout == "strided" and self.shape:
            return value[..., ::2]
        return value[1:] if self.layout == "offset" and self.shape else value


@dataclass(frozen=True, slots=True)
class Program:
    """Source of a function ``f`` over ``inputs``, and whether gradients flow through it."""

    inputs: tuple[Given, ...]
    lines: tuple[str, ...]
    returned: tuple[str, ...]
    training: bool
    dynamic: bool | None

    @property
    def source(self) -> str:
        """A function that can be pasted into a test."""
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        body = [*self.lines, f"return {', '.join(self.returned)},"]
        return f"def f({names}):\n" + "".join(f"    {line}\n" for line in body)

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function, compiled anew."""
        scope: dict[str, Any] = {"torch": torch}
        exec(self.source, scope)
        made: Callable[..., tuple[torch.Tensor, ...]] = scope["f"]
        return made

    def fresh_inputs(self, seed: int) -> list[torch.Tensor]:
        """The same at every call with this seed."""
        generator = torch.Generator().manual_seed(seed)
        return [each.make(generator, grad=self.training) for each in self.inputs]


@st.composite
def programs(draw: st.DrawFn, *, most: int = 8) -> Program:
    """Programs that eager runs: a statement that it refuses is left out."""
    training = draw(st.booleans())
    dtypes = [torch.float32, torch.float64] + ([] if training else [torch.int64, torch.bool])
    one = st.builds(
        Given, st.sampled_from(SHAPES), st.sampled_from(dtypes), st.sampled_from(LAYOUTS)
    )
    inputs = tuple(draw(st.lists(one, min_size=1, max_size=3)))
    blank = Program(inputs, (), (), training, draw(st.sampled_from((None, True))))
    scope: dict[str, Any] = {"torch": torch}
    scope |= {f"x{i}": each for i, each in enumerate(blank.fresh_inputs(0))}
    lines = []
    for number in range(draw(st.integers(1, most))):
        line = draw(_statements([name for name in scope if name[0] in "xv"], f"v{number}"))
        if _runs(line, scope):
            lines.append(line)
    names = [name for name in scope if name[0] in "xv"]
    returned = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    if names[-1] not in returned:
        returned.append(names[-1])
    return Program(inputs, tuple(lines), tuple(returned), training, blank.dynamic)


@st.composite
def _statements(draw: st.DrawFn, names: list[str], new: str) -> str:
    kind = draw(st.sampled_from((UNARY, BINARY, REDUCTIONS, VIEWS, JOINS, IN_PLACE, CASTS, OTHERS)))
    a, b = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    word = draw(st.sampled_from(kind))
    if kind is UNARY:
        return f"{new} = torch.{word}({a})"
    if kind is REDUCTIONS:
        return f"{new} = {a}.{word}(dim={draw(st.sampled_from((0, -1)))})"
    line = word.format(a, b)
    return line if kind is IN_PLACE else f"{new} = {line}"


def _runs(line: str, scope: dict[str, Any]) -> bool:
    """Run a line; what it made is forgotten where eager refuses it, or where it is large."""
    kept = dict(scope)
    try:
        exec(line, scope)
    except (RuntimeError, IndexError, TypeError, ValueError):
        pass
    else:
        if all(each.numel() <= 4096 for each in scope.values() if isinstance(each, torch.Tensor)):
            return True
    scope.clear()
    scope.update(kept)
    return False
