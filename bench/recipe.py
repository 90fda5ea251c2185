"""How long requests take under the recipe for services, once the service says that it is ready.

``python bench/recipe.py`` serves a BERT by the policy of ``docs/how-to/fleet.md``: it warms up for
eight shapes, and then four clients send requests of these shapes as fast as they are answered. The
figures are those of one process: for each shape the median, the slowest request, and how many times
the median that is; beside them the same requests answered by eager.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import machine, write_json
from transformers import BertConfig, BertModel

import composer

OPTIONS = {
    "chain": ["onnxrt", "inductor"],
    "select": {"by": "fastest", "background": True},
    "verify": "compile",
}
SHAPES = [(batch, length) for batch in (1, 2, 4, 8) for length in (16, 64)]
"""Sequences in a request, and tokens in a sequence."""

CLIENTS = 4


def request(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return the inputs of a request."""
    ids = torch.randint(0, 30_000, shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def milliseconds(
    answer: Callable[..., Any], requests: Sequence[dict[str, torch.Tensor]], seconds: float
) -> dict[int, list[float]]:
    """Return how long each request took, by its index, while all clients send requests."""
    taken: dict[int, list[float]] = defaultdict(list)
    until = time.monotonic() + seconds

    def send(client: int) -> None:
        with torch.inference_mode():
            turn = client
            while time.monotonic() < until:
                index = turn % len(requests)
                began = time.perf_counter()
                answer(**requests[index])
                taken[index].append(1e3 * (time.perf_counter() - began))
                turn += CLIENTS + 1  # so that each client sends all shapes

    clients = [threading.Thread(target=send, args=(each,)) for each in range(CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return taken


def figures(taken: list[float]) -> dict[str, float]:
    """Return the figures of one shape."""
    median = statistics.median(taken)
    return {
        "requests": len(taken),
        "median_ms": round(median, 2),
        "slowest_ms": round(max(taken), 2),
        "slowest_over_median": round(max(taken) / median, 2),
    }


def main() -> None:
    """Print the figures of each shape; ``--json PATH`` writes them as well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0, help="of requests, each way")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=args.layers,
        hidden_size=384,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    model = BertModel(config).eval()
    requests = [request(shape) for shape in SHAPES]
    compiled = torch.compile(model, backend="composer", options=OPTIONS, dynamic=True)
    began = time.perf_counter()
    with torch.inference_mode():
        composer.warm_up(compiled, requests, timeout=1800)
    torch.compiler.set_stance("eager_on_recompile")
    ready = time.perf_counter() - began
    print(f"ready after {ready:.0f} s; {composer.report()}", flush=True)
    results: dict[str, Any] = {}
    for name, answer in (("composer", compiled), ("eager", model)):
        taken = milliseconds(answer, requests, args.seconds)
        rows = {str(SHAPES[index]): figures(taken[index]) for index in sorted(taken)}
        results[name] = rows
        for shape, row in rows.items():
            print(f"{name:8}  {shape:8}  " + "  ".join(f"{k} {v}" for k, v in row.items()))
    waits = composer.reports()[-1].runtime.read()
    print(f"calls that waited after the compile: {waits.waits}, {waits.waited:.1f} s")
    if args.json:
        write_json(
            args.json, {"machine": machine(), "ready_s": round(ready, 1), "requests": results}
        )


if __name__ == "__main__":
    main()
