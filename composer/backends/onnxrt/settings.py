"""The options of ``onnxrt``, and the checks that name what is wrong in them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    field_validator,
    model_validator,
)

from composer.backends.onnxrt.library import onnxruntime
from composer.registry import nearest, unknown_among

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

Level = Literal["disable", "basic", "extended", "layout", "all"]
"""ONNX Runtime's levels of graph optimization. Each level includes the previous ones."""

SESSION_KEYS = (
    *("session.intra_op.allow_spinning", "session.intra_op.spin_duration_us"),
    *("session.intra_op_thread_affinities", "session.inter_op.allow_spinning"),
    *("session.force_spinning_stop", "session.disable_prepacking", "session.use_env_allocators"),
    *("session.set_denormal_as_zero", "session.enable_mem_pattern", "session.enable_cpu_mem_arena"),
    *("session.disable_cpu_ep_fallback", "session.disable_aot_function_inlining"),
    *("session.disable_quant_qdq", "session.enable_quant_qdq_cleanup", "session.qdqisint8allowed"),
    "session.disable_double_qdq_remover",
    *("session.use_device_allocator_for_initializers", "session.dynamic_block_base"),
    *("session.graph_optimizations_loop_level", "session.optimized_model_filepath"),
    *("optimization.enable_gelu_approximation", "optimization.disable_specified_optimizers"),
    *("optimization.enable_cast_chain_elimination", "optimization.minimal_build_optimizations"),
    *("mlas.enable_gemm_fastmath_arm64_bfloat16", "ep.context_enable", "ep.context_file_path"),
)
"""Known entries of a session's configuration, to find misspelled ones.

ONNX Runtime accepts unknown entries without an error.
"""

_SLIP = 0.85


class Settings(BaseModel):
    """How sessions are made; each field is an option of the candidate.

    Attributes:
        threads: Threads within one operator.
        providers: Execution providers in order of preference. If empty, the graph's device decides
            (CPU, or CUDA with CPU behind it).
        provider_options: Options by the name of the provider.
        graph_optimization_level: How much ONNX Runtime rewrites the graph.
        session_config: Further entries of the session's configuration, as text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: Annotated[int, Strict(), Field(gt=0)] = Field(default_factory=torch.get_num_threads)
    providers: tuple[str, ...] = ()
    provider_options: dict[str, dict[str, str]] = Field(default_factory=dict)
    graph_optimization_level: Level = "all"
    session_config: dict[str, str] = Field(default_factory=dict)

    @field_validator("providers", "provider_options")
    @classmethod
    def _providers_are_known(cls, named: Any) -> Any:
        if not named:
            return named  # ONNX Runtime is imported only to check a name
        try:
            known = onnxruntime().get_all_providers()  # also those that it was built without
        except ImportError:  # the probe reports it; names cannot be checked
            return named
        unknown = unknown_among(named, known, "unknown provider")
        if unknown:
            raise ValueError(unknown)
        return named

    @field_validator("session_config")
    @classmethod
    def _entries_are_no_slips(cls, entries: dict[str, str]) -> dict[str, str]:
        hints = []
        for key in entries:
            slip = nearest(key, SESSION_KEYS, cutoff=_SLIP)
            if slip not in (key, None):
                hints.append(f"{key!r}; did you mean {slip!r}?")
        if hints:
            raise ValueError(f"unknown entry {', '.join(hints)}")
        return entries

    @model_validator(mode="after")
    def _options_belong_to_providers(self) -> Settings:
        given = [name for name, options in self.provider_options.items() if options]
        asked = self.providers or (CUDA, CPU)
        unused = [name for name in given if name not in asked]
        if unused:
            raise ValueError(f"provider_options for {', '.join(unused)}, not in providers")
        if CPU in given:
            raise ValueError(f"provider_options: {CPU} takes none")
        return self
