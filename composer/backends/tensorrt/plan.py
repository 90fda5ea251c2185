"""Builds a plan from an ONNX model with TensorRT's builder.

Nothing here executes the plan. So it can be built in another process than the one that runs it, and
with TensorRT for RTX on a machine without a GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from composer.backends.tensorrt import cache
from composer.backends.tensorrt.dtypes import require_dtypes
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.network import parse, require_no_host_inputs, weights_of
from composer.backends.tensorrt.profiles import Profile
from composer.backends.tensorrt.settings import Settings
from composer.errors import Refusal
from composer.lowering.export.onnx import OnnxGraph
from composer.records import Reason, Status
from composer.system.disk import digest_of

_SCHEMA = 1
"""Part of every key; raise it when the same inputs give another plan."""


@dataclass(frozen=True, slots=True)
class Target:
    """The GPU that a plan is for, and its driver."""

    gpu: str
    capability: tuple[int, int]
    driver: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a plan depends on, except the library.

    Attributes:
        graph: The model.
        weights: Contiguous tensors in host memory, by the names of the model's inputs.
        dtypes: The torch dtypes of the model's inputs and outputs, by name.
        profiles: Ranges of the inputs whose shapes are not fixed.
        settings: The candidate's options.
        tf32: True if float32 products may be computed in TF32.
        target: The GPU and driver.
    """

    graph: OnnxGraph
    weights: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    profiles: tuple[Profile, ...]
    settings: Settings
    tf32: bool
    target: Target

    def facts(self, library: Library) -> dict[str, Any]:
        """Return the recipe as JSON, with digests for the model and the weights.

        The digest of these facts is the key of a plan. The bytes of the plan cannot be the key: two
        builds of one recipe give different bytes. In a refittable plan, floating-point weights can
        be replaced, so only their dtype and shape count.
        """
        model = self.graph.with_weights(self.weights)
        read, settings = weights_of(model, self.weights), self.settings
        return {
            "schema": _SCHEMA,
            "library": [library.name, library.version],
            "target": asdict(self.target),
            "model": hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest(),
            "weights": {name: self._weight(read[name]) for name in sorted(read)},
            "profiles": [{k: each[k] for k in sorted(each)} for each in self.profiles],
            "tf32": self.tf32,
            "workspace_mib": settings.workspace_mib,
            "optimization_level": settings.optimization_level,
            "max_aux_streams": settings.max_aux_streams,
            "refittable": settings.refittable,
            "weight_streaming": settings.weight_streaming_mib is not None,
        }

    def _weight(self, tensor: torch.Tensor) -> str:
        given_later = self.settings.refittable and tensor.is_floating_point()
        return _kind(tensor) if given_later else _digest(tensor)


def build_plan(
    library: Library, recipe: Recipe, check_time: Callable[[], None] = lambda: None
) -> bytes:
    """Build a plan with TensorRT and return its bytes.

    ``check_time`` is called between the steps, and raises a refusal once its time is over.

    Raises:
        Refusal: ``declined`` if the parser refuses nodes or changes dtypes; ``timed_out``;
            ``failed`` with the first error that the library logged.
    """
    with library.busy, library.log.recording() as lines:
        parsed = parse(library, recipe.graph, recipe.weights, lines)
        if parsed.network is None:
            why = "; ".join(dict.fromkeys(parsed.refused.values()))
            refused = Refusal(Status.DECLINED, Reason.UNSUPPORTED_OP, why)
            raise parsed.error or refused
        _check_types(parsed.network, recipe.dtypes)
        config = _configure(library, parsed.builder, recipe)
        monitor = config.progress_monitor = _make_monitor(library.module, check_time)
        plan = parsed.builder.build_serialized_network(parsed.network, config)
        if monitor.stopped is not None:
            raise monitor.stopped
        if plan is None:
            raise lines.refusal("TensorRT builds no plan")
        _keep_timings(library, config, recipe)
        return bytes(plan)


def _check_types(network: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    require_no_host_inputs(inputs)
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    for kind, terminals in (("input", inputs), ("output", outputs)):
        require_dtypes(kind, [(each.name, each.dtype, dtypes[each.name]) for each in terminals])


def _configure(library: Library, builder: Any, recipe: Recipe) -> Any:
    trt, settings = library.module, recipe.settings
    config = builder.create_builder_config()
    if recipe.tf32:
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    if settings.refittable:
        config.set_flag(trt.BuilderFlag.REFIT)
    if settings.weight_streaming_mib is not None:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    if settings.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_mib << 20)
    if settings.optimization_level is not None:
        config.builder_optimization_level = settings.optimization_level
    if settings.max_aux_streams is not None:
        config.max_aux_streams = settings.max_aux_streams
    for each in recipe.profiles:
        _add_profile(builder, config, each)
    _name_the_device(library, config, recipe.target)
    _recall_timings(library, config, recipe)
    return config


def _add_profile(builder: Any, config: Any, shapes: Profile) -> None:
    """Add a profile, or raise if TensorRT rejects it.

    TensorRT reports a rejected profile by a negative number, not by an exception.
    """
    profile = builder.create_optimization_profile()
    for name, (least, usual, greatest) in shapes.items():
        profile.set_shape(name, least, usual, greatest)
    if not profile or config.add_optimization_profile(profile) < 0:
        message = f"TensorRT takes no profile of the ranges {shapes}"
        raise Refusal(Status.FAILED, Reason.BUILD_FAILED, message)


def _name_the_device(library: Library, config: Any, target: Target) -> None:
    """Make TensorRT for RTX compile for the target only.

    Without a named device it compiles for every device that it supports.
    """
    capability = named_capability(library, target) if library.is_rtx else None
    if capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)


def named_capability(library: Library, target: Target) -> Any:
    """Return RTX's name for the compute capability of a GPU; ``None`` if it has none."""
    name = "SM" + "".join(map(str, target.capability))
    return library.module.ComputeCapability.__members__.get(name)


def _make_monitor(trt: Any, check_time: Callable[[], None]) -> Any:
    """Return the monitor that TensorRT asks between its steps if it may continue."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base is only known at run time
        """Ends the build when the time of the attempt is over.

        TensorRT may call it from another thread. It must raise nothing into TensorRT, so it keeps
        the refusal for later.
        """

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped: Refusal | None = None

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
            """Nothing to do."""

        def step_complete(self, phase_name: str, step: int) -> bool:
            """Return True to continue the build."""
            try:
                check_time()
            except Refusal as refusal:
                self.stopped = refusal
            return self.stopped is None

        def phase_finish(self, phase_name: str) -> None:
            """Nothing to do."""

    return Monitor()


def _recall_timings(library: Library, config: Any, recipe: Recipe) -> None:
    """Give the builder the kernel times that earlier builds measured."""
    facts = _measured_on(library, recipe)
    if facts is None:
        return
    entry = cache.timings().get(digest_of(facts))
    known = config.create_timing_cache((entry and entry.blob) or b"")
    config.set_timing_cache(known, ignore_mismatch=False)


def _keep_timings(library: Library, config: Any, recipe: Recipe) -> None:
    facts = _measured_on(library, recipe)
    if facts is None:
        return
    times = config.get_timing_cache()
    if times is not None:
        cache.timings().put(digest_of(facts), facts, bytes(times.serialize()))


def _measured_on(library: Library, recipe: Recipe) -> dict[str, Any] | None:
    """Return what kernel times depend on; ``None`` if none are kept.

    TensorRT for RTX measures no kernels.
    """
    if library.is_rtx or not recipe.settings.timing_cache:
        return None
    return {"library": [library.name, library.version], "target": asdict(recipe.target)}


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.reshape(-1).view(torch.uint8).numpy()
    facts = _kind(tensor).encode()
    return hashlib.sha256(facts + hashlib.sha256(values.data).digest()).hexdigest()
