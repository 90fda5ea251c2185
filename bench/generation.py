"""A step of text generation: one token, and a cache of keys and values of all before it.

``python bench/generation.py`` has a model of Qwen2.5-0.5B's configuration (random weights) compute
its next token, by each engine, in rounds. The cache is a ``StaticCache``, which is written to in
place, or a ``DynamicCache``, which becomes longer at every step. Each call of a variant is the same
step: a static cache is written to at one place, and a growing one is given again as it was.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from compiles import first_line, own_code, time_together
from rich.console import Console
from rich.table import Table
from timing import Series, machine, measure, paired_ratio, write_json
from torch import Tensor, nn

import composer

EAGER = "eager"
BACKENDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "inductor": ("inductor", None),
    "onnxrt": ("composer", {"chain": ["onnxrt"]}),
    "openvino": ("composer", {"chain": ["openvino"]}),
}
KINDS = ("static", "growing")
TOLERANCE = 1e-4
"""How far logits may be off, as a share of the largest."""

Cache = transformers.Cache
Step = Callable[[nn.Module, Tensor, Cache, int], Tensor]


def step(model: nn.Module, token: Tensor, cache: Cache, at: int) -> Tensor:
    """The logits of the next token; shape (1, 1, vocabulary), float32."""
    place = torch.tensor([at])
    output = model(
        input_ids=token,
        past_key_values=cache,
        cache_position=place,
        position_ids=place[None],
        use_cache=True,
    )
    logits: Tensor = output.logits
    return logits


def built(tiny: bool) -> nn.Module:
    """The model in eval mode, float32; always the same weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864}
    if tiny:
        sizes = {"hidden_size": 224, "num_hidden_layers": 2, "intermediate_size": 512}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = transformers.Qwen2Config(**sizes, **heads, vocab_size=2_000 if tiny else 151_936)
    return transformers.Qwen2ForCausalLM(config).eval()


def filled(model: nn.Module, kind: str, places: int, tokens: int) -> Cache:
    """A cache that has so many tokens; a static one has so many places."""
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=places)
    else:
        cache = transformers.DynamicCache(config=model.config)
    prompt = torch.arange(tokens)[None] % model.config.vocab_size
    model(input_ids=prompt, past_key_values=cache, use_cache=True)
    return cache


def as_it_was(cache: Cache, tokens: int) -> Cache:
    """The cache with so many tokens: a growing one does not write to what it has."""
    if isinstance(cache, transformers.StaticCache):
        for layer in cache.layers:
            layer.cumulative_length.fill_(tokens)
        return cache
    fresh = copy.copy(cache)
    fresh.layers = [copy.copy(layer) for layer in cache.layers]
    return fresh


def call_of(run: Step, model: nn.Module, token: Tensor, cache: Cache, at: int) -> Callable[[], Any]:
    """One step by ``run``, the same each time."""
    return lambda: run(model, token, as_it_was(cache, at), at)


def bench(kind: str, places: int, rounds: int, *, tiny: bool) -> dict[str, Any]:
    """Milliseconds of a step by engine, and eager's and Inductor's over them.

    Args:
        kind: One of :data:`KINDS`.
        places: Of a static cache; of a growing one, the tokens in it. A static one has half as
            many in it.
        rounds: Those that count.
        tiny: The small model.
    """
    model = built(tiny)
    tokens = places // 2 if kind == "static" else places
    cache, token = filled(model, kind, places, tokens), torch.tensor([[7]])
    less = tokens - 2 if kind == "growing" else tokens
    shorter = filled(model, kind, places, less) if less < tokens else cache
    calls = {EAGER: call_of(step, model, token, cache, tokens)}
    expected = calls[EAGER]()
    served: dict[str, Any] = {}
    for name, (backend, options) in BACKENDS.items():
        run = torch.compile(own_code(step, name), backend=backend, options=options)
        call_of(run, model, token, shorter, less)()  # the second length makes it a symbol
        calls[name] = call_of(run, model, token, cache, tokens)
        served[name] = told(calls[name](), expected, name)
    taken, failures = time_together(calls, lambda left: measure(left, rounds))
    return {
        "kind": kind,
        "places": places,
        "milliseconds": {name: each.to_dict() for name, each in taken.items()},
        "ratios": ratios(taken),
        "served": served,
        "failures": failures,
    }


def told(found: Tensor, expected: Tensor, name: str) -> dict[str, Any]:
    """The error, and of composer who serves and how much of the graph.

    Raises:
        RuntimeError: the logits are off, or somebody else serves.
    """
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name} is off by {error:.1e}")
    if BACKENDS[name][0] != "composer":
        return {"error": error}
    report = composer.reports()[-1]
    wanted = BACKENDS[name][1] or {}
    if report.chosen not in wanted["chain"]:
        why = first_line(RuntimeError(report.attempts[0].message))
        raise RuntimeError(f"meant to measure {name}, but {report.chosen} serves: {why}")
    return {"error": error, "coverage": report.attempts[0].coverage}


def ratios(taken: Mapping[str, Series]) -> dict[str, dict[str, Any]]:
    """Eager's and Inductor's times over those of each variant, round by round."""
    return {
        name: {
            base: paired_ratio(taken[base], series).to_dict()
            for base in (EAGER, "inductor")
            if base in taken and base != name
        }
        for name, series in taken.items()
        if name != EAGER
    }


def show(found: Mapping[str, Any]) -> None:
    """A table of one cache."""
    title = f"{found['kind']} cache, {found['places']} places"
    table = Table("engine", "median ms", "eager / it", "inductor / it", title=title)
    for name, each in found["milliseconds"].items():
        over = found["ratios"].get(name, {})
        bases = [over.get(base) for base in (EAGER, "inductor")]
        cells = (f"{base['median']:.2f}" if base else "" for base in bases)
        table.add_row(name, f"{each['median_ms']:.2f}", *cells)
    for name, why in found["failures"].items():
        table.add_row(name, why)
    Console().print(table)


def main() -> None:
    """Print the figures of each cache; ``--json PATH`` writes them as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--places", default="512,4096", help="how many each cache has")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "tiny": given.tiny, "results": []}
    with torch.no_grad():
        for kind in given.kinds.split(","):
            for places in map(int, given.places.split(",")):
                torch.compiler.reset()
                composer.reset()
                found = bench(kind, places, given.rounds, tiny=given.tiny)
                record["results"].append(found)
                show(found)
    if given.json:
        write_json(given.json, record)


if __name__ == "__main__":
    main()
