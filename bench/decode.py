"""Tokens a second of text generation, by the precision of the weights and by engine.

``python bench/decode.py`` has a small Llama (random weights, a static cache, batch 1) compute its
next token, as ``bench/generation.py`` does for Qwen2. Its weights are in float32, in bfloat16, and
quantised by torchao to eight and to four bits; and composer makes eight bits of the float32 ones
(``precision = "int8"``). All variants are timed in interleaved rounds, in one process.

A step reads each weight once. So the bytes of the weights, times the tokens of a second, are a
share of what the machine can read from memory, which is measured as well.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from compiles import own_code, positive, time_together
from generation import call_of, filled, step
from rich.console import Console
from rich.table import Table
from timing import machine, measure, paired_ratio, write_json
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

import composer

BASE = "float32, inductor"
OWN = {"precision": {"mode": "int8", "max_error": 0.1}}


@dataclass(frozen=True)
class Weights:
    """A precision of the weights.

    Attributes:
        prepare: Changes a model in float32 to it.
        engines: The engines that run it.
        options: What composer is told besides.
        tolerance: How far logits may be off eager's of the prepared model, as a share of the
            largest.
        bits: Of a weight, where ``prepare`` does not change the tensors.
    """

    prepare: Callable[[nn.Module], object] = lambda model: None
    engines: tuple[str, ...] = ("inductor", "onnxrt", "openvino")
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-3
    bits: int | None = None


WEIGHTS = {
    "float32": Weights(),
    "bfloat16": Weights(lambda model: model.bfloat16(), tolerance=0.1),
    "int8 by composer": Weights(engines=("onnxrt", "openvino"), options=OWN, tolerance=0.1, bits=8),
    "int8 by torchao": Weights(lambda model: quantize_(model, Int8WeightOnlyConfig())),
    "int4 by torchao": Weights(
        lambda model: quantize_(model, IntxWeightOnlyConfig(torch.int4, PerGroup(32)))
    ),
}


def built(tiny: bool) -> nn.Module:
    """Return the model in eval mode, float32; always the same weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 2816}
    if tiny:
        sizes = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**sizes, **heads, vocab_size=500 if tiny else 32_000)
    return transformers.LlamaForCausalLM(config).eval()


def megabytes(model: nn.Module, bits: int | None) -> float:
    """Return how much a step reads: the weights of linear layers, in their form."""
    total = 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            total += sum(each.nbytes for each in plain(layer.weight))
            if bits is not None:
                total += layer.weight.numel() * bits // 8 - layer.weight.nbytes
    return total / 1e6


def plain(weight: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor of torchao's consists of."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield weight
        return
    names, _ = weight.__tensor_flatten__()
    for name in names:
        yield from plain(getattr(weight, name))


def bandwidth(seconds: float = 2.0) -> float:
    """Return how many megabytes torch reads in a second: the best of sums over 512 MB."""
    numbers = torch.ones(128_000_000)
    until = time.monotonic() + seconds
    best = float("inf")
    while time.monotonic() < until:
        began = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - began)
    return numbers.nbytes / 1e6 / best


def bench(titles: Sequence[str], places: int, rounds: int, *, tiny: bool) -> dict[str, Any]:
    """Return the times of a step of each variant, and what it reads.

    Args:
        titles: Those of :data:`WEIGHTS`.
        places: Of the static cache, of which half have a token.
        rounds: Those that count.
        tiny: The very small model.
    """
    calls: dict[str, Callable[[], Any]] = {}
    about: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    float32 = built(tiny)
    token = torch.tensor([[7]])
    for title in titles:
        weights = WEIGHTS[title]
        model = copy.deepcopy(float32)
        weights.prepare(model)
        tokens = places // 2
        cache = filled(model, "static", places, tokens)
        expected = call_of(step, model, token, cache, tokens)().clone()
        for engine in weights.engines:
            name = f"{title}, {engine}"
            given: dict[str, Any] = {"backend": "inductor"}
            if engine != "inductor":
                options = {"chain": [engine], **weights.options}
                given = {"backend": "composer", "options": options}
            run = torch.compile(own_code(step, name), **given)
            calls[name] = call_of(run, model, token, cache, tokens)
            found = calls[name]()
            error = float((found - expected).abs().max() / expected.abs().max())
            about[name] = {"megabytes": megabytes(model, weights.bits), "error": error}
            if engine != "inductor":
                about[name] |= served()
            if not error <= weights.tolerance:
                failures[name] = f"off by {error:.1e}"
                del calls[name]
    taken, failed = time_together(calls, lambda left: measure(left, rounds))
    for name, series in taken.items():
        about[name]["milliseconds"] = series.to_dict()
        about[name]["over float32"] = paired_ratio(taken[BASE], series).to_dict()
    return {"places": places, "variants": about, "failures": failures | failed}


def served() -> dict[str, Any]:
    """Return who serves the graph that composer compiled last, and how much of it."""
    report = composer.reports()[-1]
    facts = {"chosen": report.chosen}
    for each in report.attempts:
        if each.accepted:
            facts["coverage"] = each.coverage
            for name in ("products_in_int8", "weights_in_int8"):
                if name in each.engine:
                    facts[name] = each.engine[name]
    return facts


def rows(found: dict[str, Any], read: float) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each variant; ``read`` is how many megabytes a second can be read."""
    for name, each in found["variants"].items():
        if "milliseconds" not in each:
            yield name, found["failures"].get(name, "")
            continue
        a_second = 1e3 / each["milliseconds"]["median_ms"]
        ratio = each["over float32"]
        spread = f"{ratio['median']:.2f} ({ratio['p25']:.2f}-{ratio['p75']:.2f})"
        share = each["megabytes"] * a_second / read
        yield name, f"{a_second:.1f}", spread, f"{each['megabytes']:.0f}", f"{share:.0%}"


def main() -> None:
    """Print the figures; ``--json PATH`` writes them as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    some = "further ones, besides float32, with commas between them"
    parser.add_argument("--weights", default=",".join(list(WEIGHTS)[1:]), help=some)
    parser.add_argument("--places", type=positive, default=512, help="of the static cache")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--tiny", action="store_true", help="a very small model")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "tiny": given.tiny}
    record["megabytes_a_second"] = read = bandwidth()
    with torch.no_grad():
        titles = [next(iter(WEIGHTS)), *given.weights.split(",")]
        record |= bench(titles, given.places, given.rounds, tiny=given.tiny)
    headings = ("variant", "tokens / s", "float32 by inductor / it", "MB a token", "of bandwidth")
    table = Table(*headings, title=f"the machine reads {read:.0f} MB a second")
    for row in rows(record, read):
        table.add_row(*row)
    Console().print(table)
    if given.json:
        write_json(given.json, record)


if __name__ == "__main__":
    main()
