"""Load one ONNX model into a session, which runs on torch's memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from composer.backends.onnx_engine import BuildFacts, Loaded, OnnxBuild, OnnxRegion
from composer.backends.onnxrt.binding import bound_run
from composer.backends.onnxrt.capacity import require_memory
from composer.backends.onnxrt.kernels import widens_bfloat16
from composer.backends.onnxrt.native import native_run, why_not_native
from composer.backends.onnxrt.ports import Ports, Run
from composer.backends.onnxrt.session import make_session, nodes_by_provider
from composer.backends.onnxrt.settings import Settings


def load(
    region: OnnxRegion, weights: Mapping[str, torch.Tensor], build: OnnxBuild[Settings]
) -> Loaded:
    """Make a session for a region, which reads the weights in place.

    Raises:
        MemoryError: copies of weights in half precision would not fit into memory.
        Refusal: as :func:`~composer.backends.onnxrt.session.make_session`.
    """
    device = build.device
    ports = Ports.of(region, device)
    start = bound_run if why_not_native(device.type) else native_run
    if device.type == "cpu":
        require_memory(weights.values())
        made = make_session(region.graph, weights, build.settings, device)
        run = start(made[0], ports)
    else:
        if not build.is_at_call:
            torch.cuda.synchronize(device)  # no stream writes to a weight while it is read
        with _on_second_stream(device):
            made = make_session(region.graph, weights, build.settings, device)
            run = _waiting(start(made[0], ports), device)
    session, values, products = made
    sums: dict[str, Any] = {"nodes": nodes_by_provider(session)}
    if products is not None:
        sums["products_in_int8"] = products
    if ports.rewritten:
        sums["written_in_place"] = len(ports.rewritten)
    facts = BuildFacts(providers=list(session.get_providers()))
    if widens_bfloat16(device) and region.graph.rounds_to_bfloat16():
        facts.extra["bfloat16"] = "computed in float32"
    return Loaded(run=run, facts=facts, sums=sums, keeps=(session, *values))


def _waiting(run: Run, device: torch.device) -> Run:
    """Have a session run on a second CUDA stream.

    The caller's stream waits for that stream; the calling thread does not wait. All regions of a
    device share the second stream. It is needed because ONNX Runtime takes the default stream for
    "no stream". It would then use a stream of its own, which nothing waits for.
    """

    def run_on_second_stream(args: tuple[Any, ...]) -> list[torch.Tensor]:
        current = torch.cuda.current_stream(device)
        with _on_second_stream(device):
            results = run(args)
        for each in results:
            if each.is_cuda:
                each.record_stream(current)
        return results

    return run_on_second_stream


@contextmanager
def _on_second_stream(device: torch.device) -> Iterator[None]:
    """Run after the work in the caller's stream; later work in that stream waits for this."""
    current = torch.cuda.current_stream(device)
    stream = _stream_of(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)  # so memory freed there is not reused too early


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
