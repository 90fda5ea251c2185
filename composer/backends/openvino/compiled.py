"""One model compiled by OpenVINO, which reads and writes torch's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from composer.backends.onnx_engine import (
    BuildFacts,
    Loaded,
    OnnxBuild,
    OnnxRegion,
    Reason,
    Status,
    never_freed_in_forks,
    refuse,
)
from composer.backends.openvino import library
from composer.backends.openvino.corrections import correct
from composer.backends.openvino.gates import has_gate
from composer.backends.openvino.layouts import read_in_several_ways
from composer.backends.openvino.lookups import require_within
from composer.backends.openvino.memory import Feed, Place, feed_for, place_for
from composer.backends.openvino.model import precision_of, with_weights
from composer.backends.openvino.settings import Settings
from composer.backends.openvino.snippets import SEPARATE, config_for

_HINTS = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}

_EXACT_ACTIVATIONS = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
"""On processors with VNNI, OpenVINO would round activations that meet a weight in eight bits."""


def load(
    region: OnnxRegion, weights: Mapping[str, torch.Tensor], build: OnnxBuild[Settings]
) -> Loaded:
    """Compile the model of a region with its weights.

    Raises:
        Refusal: OpenVINO would confuse a constant, or computes in another precision.
        IndexError: a weight holds a position outside its table.
    """
    settings = build.settings
    made, config, taken_in = with_weights_taken_in(region, weights, build)
    names = region.graph.inputs
    compiled = never_freed_in_forks(_compile(made, settings.device, config))
    _require_precision(compiled, _config(settings, precision_of(region, build)))
    position = {name: i for i, name in enumerate(names)}
    indices = [position[port.node.friendly_name] for port in compiled.inputs]
    outputs = zip(compiled.outputs, region.graph.outputs, strict=True)
    model = _Compiled(
        compiled,
        feeds=tuple((i, feed_for(region.dtypes[i])) for i in indices),
        checks=tuple((i, n) for i, n in region.tables.items() if names[i] not in taken_in),
        places=tuple(place_for(output, port.partial_shape) for port, output in outputs),
    )
    streams = _number(compiled, "NUM_STREAMS")
    facts = BuildFacts(
        precision=_precision(compiled),
        threads=_number(compiled, "INFERENCE_NUM_THREADS"),
        extra={} if streams is None else {"streams": streams},
    )
    sums = _weights_in_int8(compiled, taken_in)
    return Loaded(run=model.run, facts=facts, sums=sums, keeps=(compiled, *taken_in.values()))


def with_weights_taken_in(
    region: OnnxRegion, weights: Mapping[str, torch.Tensor], build: OnnxBuild[Settings]
) -> tuple[Any, dict[str, str], Mapping[str, torch.Tensor]]:
    """Return the model that is compiled, its properties, and the weights that it holds.

    Raises:
        Refusal: OpenVINO would confuse a constant.
        IndexError: a weight holds a position outside its table.
    """
    settings = build.settings
    asked = _config(settings, precision_of(region, build))
    config = _properties(region.read, settings, asked)
    taken_in = _without_confused(region, weights)
    names = region.graph.inputs
    for i, size in region.tables.items():
        if names[i] in taken_in:
            require_within(taken_in[names[i]], size)
    made = with_weights(region.read, taken_in)
    in_bfloat16 = config.get("INFERENCE_PRECISION_HINT") != "f32"
    correct(made, in_bfloat16=in_bfloat16, keeps_nan=settings.keeps_nan)
    return made, config, taken_in


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled model.

    Attributes:
        compiled: OpenVINO's compiled model.
        feeds: For each input, the index of its argument and the function that hands it over.
        checks: Indices of arguments that hold positions in a table, each with the size of the
            table.
        places: For each output, the function that makes its memory.
        idle: Requests that no thread is using.
    """

    compiled: Any
    feeds: tuple[tuple[int, Feed], ...]
    checks: tuple[tuple[int, int], ...]
    places: tuple[Place, ...]
    idle: list[Any] = field(default_factory=list)

    def run(self, args: tuple[Any, ...]) -> list[Any]:
        """Run the model on the arguments. Several threads may call it.

        An output is in torch's memory if its shape is fixed. It is in OpenVINO's memory if a size
        is known only after the run.

        Raises:
            IndexError: a position is outside its table.
        """
        for at, size in self.checks:
            require_within(args[at], size)
        request = self._request()
        given = [feed(args[at]) for at, feed in self.feeds]  # they must live during the call
        for i, tensor in enumerate(given):
            request.set_input_tensor(i, tensor)
        fetches = []
        for i, place in enumerate(self.places):
            tensor, fetch = place()
            request.set_output_tensor(i, tensor)
            fetches.append(fetch)
        request.infer(share_outputs=True)
        results = [fetch() for fetch in fetches]
        self.idle.append(request)
        return results

    def _request(self) -> Any:
        """Return a request that no other thread uses; the caller puts it back into ``idle``."""
        try:
            return self.idle.pop()
        except IndexError:
            return self.compiled.create_infer_request()


def _compile(made: Any, device: str, config: Mapping[str, str]) -> Any:
    """Compile the model; if a fused kernel cannot be made, compile each operation by itself.

    Raises:
        RuntimeError: OpenVINO's own error, with its last line first.
    """
    try:
        return library.core().compile_model(made, device, config)
    except RuntimeError as error:
        if "snippet" in str(error) and config.keys().isdisjoint(SEPARATE):
            return _compile(made, device, {**config, **SEPARATE})
        raise RuntimeError(f"{library.last_line(error)}\n{error}") from error


def _properties(read: Any, settings: Settings, asked: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of the model; the user's own override almost all others.

    One thread computes in single precision if any other would end the process.
    """
    config = dict(asked)
    if settings.device == "CPU":
        in_float32 = config.get("INFERENCE_PRECISION_HINT") == "f32"
        config = {**config_for(read, in_float32=in_float32), **config}
    if config.get("INFERENCE_NUM_THREADS") == "1" and has_gate(read):
        config["INFERENCE_PRECISION_HINT"] = "f32"
    return config


def _without_confused(
    region: OnnxRegion, weights: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the weights that OpenVINO does not confuse; the others stay inputs.

    Raises:
        Refusal: a constant of the graph is confused.
    """
    confused = read_in_several_ways(region.read, weights.keys())
    if not confused:
        return weights
    inputs = frozenset[str]().union(*confused) - region.names(region.constants)
    if read_in_several_ways(region.read, weights.keys() - inputs):
        what = "OpenVINO takes a constant that is read transposed for the one that is not"
        refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, what)
    return {name: weight for name, weight in weights.items() if name not in inputs}


def _config(settings: Settings, precision: str) -> dict[str, str]:
    """Return the properties for OpenVINO; the user's own properties override composer's."""
    config = {"PERFORMANCE_HINT": "LATENCY"}
    if settings.device == "CPU":
        config["INFERENCE_NUM_THREADS"] = str(settings.threads)
        if precision in ("fp32", "bf16"):
            config |= _EXACT_ACTIVATIONS
    if precision in _HINTS:
        config["INFERENCE_PRECISION_HINT"] = _HINTS[precision]
    return config | settings.config


def _require_precision(compiled: Any, config: Mapping[str, str]) -> None:
    """Refuse if single precision was asked for and OpenVINO computes in another one.

    Low precision is only an allowance: a processor without it computes in float32.
    """
    asked, found = config.get("INFERENCE_PRECISION_HINT"), _precision(compiled)
    if asked == "f32" and found != asked:
        what = f"asked OpenVINO to compute in {asked}, and it computes in {found}"
        refuse(Status.FAILED, Reason.WRONG_PROVIDER, what)


def _weights_in_int8(compiled: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return how many products read their weight in eight bits, by the model that is run.

    Nothing is returned for a model without 8-bit weights.
    """
    if not any(each.dtype in (torch.int8, torch.uint8) for each in weights.values()):
        return {}
    facts = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    products = [each for each in facts if each["layerType"].astype(str) == "FullyConnected"]
    kinds = [each["runtimePrecision"].astype(str) for each in products]
    return {"weights_in_int8": sum(kind in ("i8", "u8") for kind in kinds)}


def _number(compiled: Any, key: str) -> int | None:
    """Return a numeric property of the compiled model; ``None`` if the device does not have it."""
    known = key in compiled.get_property("SUPPORTED_PROPERTIES")
    return int(compiled.get_property(key)) if known else None


def _precision(compiled: Any) -> str:
    """Return the precision in which float32 is computed, by OpenVINO's name."""
    return str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
