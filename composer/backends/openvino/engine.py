"""One model compiled by OpenVINO, which reads and writes torch's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from composer import _torch
from composer.backends.forks import never_freed_in_forks
from composer.backends.openvino import library
from composer.backends.openvino.corrections import correct
from composer.backends.openvino.gates import has_gate
from composer.backends.openvino.layouts import read_in_several_ways
from composer.backends.openvino.lookups import require_within, table_sizes
from composer.backends.openvino.memory import Feed, Place, feed_for, place_for
from composer.backends.openvino.model import Model, with_weights
from composer.backends.openvino.settings import Settings
from composer.backends.openvino.snippets import SEPARATE, config_for
from composer.backends.openvino.wide import in_float32
from composer.errors import refuse
from composer.lowering.partition.regions import Region
from composer.lowering.weights.bindings import BindingEngine
from composer.records import Reason, Status

_HINTS = {"fp32": "f32", "bf16": "bf16"}


@dataclass(frozen=True, slots=True)
class Bound:
    """A compiled model with its weights.

    Attributes:
        compiled: OpenVINO's compiled model.
        feeds: For each input, the index of its argument and the function that hands it over.
        checks: Indices of arguments that hold positions in a table, each with the size of the
            table.
        places: For each output, the function that makes its memory.
        keep_alive: The weights, whose memory the device may read.
        idle: Requests that no thread is using.
    """

    compiled: Any
    feeds: tuple[tuple[int, Feed], ...]
    checks: tuple[tuple[int, int], ...]
    places: tuple[Place, ...]
    keep_alive: tuple[torch.Tensor, ...]
    idle: list[Any] = field(default_factory=list)

    def request(self) -> Any:
        """Return a request that no other thread uses; the caller puts it back into ``idle``."""
        try:
            return self.idle.pop()
        except IndexError:
            return self.compiled.create_infer_request()


class OpenVinoEngine(BindingEngine[Bound]):
    """Runs one model on the inputs of a region; several threads may call it.

    Args:
        model: The model.
        region: The region that the model was made from. Its weights are passed by address.
        settings: How to compile.
        precision: The precision in which float32 is computed: ``"fp32"``, ``"bf16"`` or
            ``"default"``.
    """

    def __init__(self, model: Model, region: Region, settings: Settings, precision: str) -> None:
        super().__init__(region)
        narrow = (
            precision == "bf16" and settings.device == "CPU" and _torch.processor.multiplies_bf16()
        )
        self._model = _marked(model, region) if narrow else model
        self._dtypes = region.input_dtypes
        self._table_sizes = table_sizes(region.gm)
        self._device = settings.device
        self._keeps_nan = settings.keeps_nan
        self._config = _config(settings, precision)
        first = self.bind_first(region)
        self.precision = _precision(first.compiled)
        self.threads = _number(first.compiled, "INFERENCE_NUM_THREADS")
        self.streams = _number(first.compiled, "NUM_STREAMS")

    def __call__(self, *args: Any) -> list[Any]:
        """Run the model on the arguments.

        An output is in torch's memory if its shape is fixed. It is in OpenVINO's memory if a size
        is known only after the run.

        Raises:
            IndexError: a position is outside its table.
        """
        bound = self._made_for(args)
        for at, size in bound.checks:
            require_within(args[at], size)
        request = bound.request()
        given = [feed(args[at]) for at, feed in bound.feeds]  # they must live during the call
        for i, tensor in enumerate(given):
            request.set_input_tensor(i, tensor)
        fetches = []
        for i, place in enumerate(bound.places):
            tensor, fetch = place()
            request.set_output_tensor(i, tensor)
            fetches.append(fetch)
        request.infer(share_outputs=True)
        results = [fetch() for fetch in fetches]
        bound.idle.append(request)
        return results

    def _compile(self, made: Any, config: Mapping[str, str]) -> Any:
        """Compile the model; if a fused kernel cannot be made, compile each operation by itself.

        Raises:
            RuntimeError: OpenVINO's own error, with its last line first.
        """
        compiles = library.core().compile_model
        try:
            return compiles(made, self._device, config)
        except RuntimeError as error:
            if "snippet" in str(error) and config.keys().isdisjoint(SEPARATE):
                return self._compile(made, {**config, **SEPARATE})
            raise RuntimeError(f"{library.last_line(error)}\n{error}") from error

    def _make(self, values: Mapping[int, torch.Tensor]) -> Bound:
        names = self._model.graph.inputs
        values = self._without_confused(values)
        for i in self._table_sizes.keys() & values.keys():
            require_within(values[i], self._table_sizes[i])
        held = {names[i]: each.detach().contiguous() for i, each in values.items()}
        config = self._properties()
        made = with_weights(self._model, held)
        in_bfloat16 = config.get("INFERENCE_PRECISION_HINT") != "f32"
        correct(made, in_bfloat16=in_bfloat16, keeps_nan=self._keeps_nan)
        compiled = never_freed_in_forks(self._compile(made, config))
        _require_precision(compiled, self._config)
        position = {name: i for i, name in enumerate(names)}
        indices = [position[port.node.friendly_name] for port in compiled.inputs]
        outputs = zip(compiled.outputs, self._model.graph.outputs, strict=True)
        return Bound(
            compiled,
            feeds=tuple((i, feed_for(self._dtypes[i])) for i in indices),
            checks=tuple((i, size) for i, size in self._table_sizes.items() if i not in values),
            places=tuple(place_for(output, port.partial_shape) for port, output in outputs),
            keep_alive=tuple(held.values()),
        )

    def _properties(self) -> dict[str, str]:
        """Return the properties of the model; the user's own override almost all others.

        One thread computes in single precision if any other would end the process.
        """
        read, config = self._model.read, dict(self._config)
        if self._device == "CPU":
            config = {**config_for(read), **config}
        if config.get("INFERENCE_NUM_THREADS") == "1" and has_gate(read):
            config["INFERENCE_PRECISION_HINT"] = "f32"
        return config

    def _without_confused(self, values: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Return the weights that OpenVINO does not confuse; the others stay inputs.

        Raises:
            Refusal: a constant of the graph is confused.
        """
        names = self._model.graph.inputs
        weights = {names[i] for i in values}
        confused = read_in_several_ways(self._model.read, weights)
        if not confused:
            return values
        inputs = frozenset[str]().union(*confused) - {names[i] for i in self._constants}
        if read_in_several_ways(self._model.read, weights - inputs):
            what = "OpenVINO takes a constant that is read transposed for the one that is not"
            refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, what)
        return {i: weight for i, weight in values.items() if names[i] not in inputs}


def _marked(model: Model, region: Region) -> Model:
    bound = {model.graph.inputs[i] for i in (*region.weights, *region.constants)}
    return Model(in_float32(model.read, bound), model.graph)


def _config(settings: Settings, precision: str) -> dict[str, str]:
    """Return the properties for OpenVINO; the user's own properties override composer's."""
    config = {"PERFORMANCE_HINT": "LATENCY"}
    if settings.device == "CPU":
        config["INFERENCE_NUM_THREADS"] = str(settings.threads)
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


def _number(compiled: Any, key: str) -> int | None:
    """Return a numeric property of the compiled model; ``None`` if the device does not have it."""
    known = key in compiled.get_property("SUPPORTED_PROPERTIES")
    return int(compiled.get_property(key)) if known else None


def _precision(compiled: Any) -> str:
    """Return the precision in which float32 is computed, by OpenVINO's name."""
    return str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
