"""An engine for each range of sizes: is it the fastest at each batch from 1 to 64?

``python bench/size_ranges.py`` compiles three small models with each engine alone, and with
composer under ``select`` with ``ranges = 3``. All sizes are called some times first, so that
composer has measured what it measures. Then, at each batch, the variants are timed round by round.
What counts is the ratio of composer's time to that of the engine that is the fastest at that batch.

Dynamo makes a graph of its own for a batch of 1. All other batches share one graph.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from compiles import own_code, positive
from rich.console import Console
from rich.table import Table
from timing import machine, measure, paired_ratio, write_json
from torch import Tensor, nn

import composer

BATCHES = (1, 2, 4, 8, 16, 32, 64)
ENGINES: tuple[str, ...] = ("onnxrt", "inductor")
if importlib.util.find_spec("openvino") is not None:
    ENGINES = ("openvino", *ENGINES)
COMPOSER = "composer"
ROUNDS_BEFORE = 4
"""How often all sizes are called before they are timed: a choice may begin in the second round,
and what it finds may make another one worth its while."""

Model = Callable[[Tensor], Tensor]


def perceptron() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Three linear layers, with a GELU between them."""
    layers = [nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(1024, 256)), lambda batch: torch.randn(batch, 256)


def bert() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """BERT with two layers, on 64 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=2, hidden_size=256, num_attention_heads=4)
    return BertModel(config), lambda batch: torch.randint(0, 1000, (batch, 64))


def convolutions() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Three convolutions with a norm behind each, on images of 32 times 32."""
    layers: list[nn.Module] = []
    for channels, following in ((3, 32), (32, 64), (64, 64)):
        layers.append(nn.Conv2d(channels, following, 3, stride=2, padding=1))
        layers.append(nn.BatchNorm2d(following))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers), lambda batch: torch.randn(batch, 3, 32, 32)


MODELS = {"perceptron": perceptron, "bert": bert, "convolutions": convolutions}


def compiled(module: nn.Module, name: str) -> Model:
    """The model by one engine alone, or by composer's choice for each range of sizes."""
    options: dict[str, Any] = {"chain": [name]}
    if name == COMPOSER:
        options = {"chain": list(ENGINES), "select": {"by": "fastest", "ranges": 3}}

    def call(x: Tensor) -> Tensor:
        return module(x)

    return torch.compile(own_code(call, name), backend="composer", options=options)


def of_batch(x: Tensor) -> Tensor:
    """The input, with a dynamic batch where Dynamo allows for one."""
    if len(x) > 1:
        torch._dynamo.mark_dynamic(x, 0)
    return x


def measured(name: str, batches: Sequence[int], rounds: int) -> dict[str, Any]:
    """The times of all variants at each batch, and composer's beside the fastest engine's."""
    torch.compiler.reset()
    composer.reset()
    torch.manual_seed(0)
    module, make = MODELS[name]()
    module.eval()
    inputs = {batch: of_batch(make(batch)) for batch in batches}
    variants = {each: compiled(module, each) for each in (*ENGINES, "eager", COMPOSER)}
    for call in variants.values():
        for _ in range(ROUNDS_BEFORE):
            for x in inputs.values():
                call(x)
    rows = {}
    for batch, x in inputs.items():
        series = measure({each: functools.partial(variants[each], x) for each in variants}, rounds)
        alone = {each: times.median for each, times in series.items() if each != COMPOSER}
        best = min(alone, key=lambda each: alone[each])
        ratio = paired_ratio(series[COMPOSER], series[best]).to_dict()
        times = {each: found.to_dict() for each, found in series.items()}
        rows[batch] = {"best": best, "over_best": ratio, "times": times}
    serving = [each for each in composer.reports() if len(each.attempts) > 1]
    return {
        "batches": rows,
        "served_by": [
            {"dynamic": each.dynamic, "chosen": each.chosen, "ranges": each.to_dict()["ranges"]}
            for each in serving
        ],
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print a table of a model."""
    table = Table(title=f"{name}: composer's time over the fastest engine's")
    for heading in ("batch", "fastest", "ms", "ratio", "quartiles"):
        table.add_column(heading, justify="right")
    for batch, row in found["batches"].items():
        ratio = row["over_best"]
        spread = f"{ratio['p25']:.3f}-{ratio['p75']:.3f}"
        milliseconds = f"{row['times'][row['best']]['median_ms']:.3f}"
        table.add_row(str(batch), row["best"], milliseconds, f"{ratio['median']:.3f}", spread)
    console = Console()
    console.print(table)
    for each in found["served_by"]:
        console.print(each)


def main() -> None:
    """Print the tables; ``--json PATH`` writes the figures as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "models": {}}
    batches = [int(each) for each in given.batches.split(",")]
    with torch.no_grad(), composer.using({"cache": {"verdicts": 0}}):
        for name in given.models.split(","):
            record["models"][name] = measured(name, batches, given.rounds)
            show(name, record["models"][name])
    if given.json:
        write_json(given.json, record)


if __name__ == "__main__":
    main()
