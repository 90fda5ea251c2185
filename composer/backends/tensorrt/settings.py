"""Options of composer's own TensorRT engine: read once, refused with the name of what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator

from composer.backends.options import read_options

Precision = Literal["fp32", "fp16", "bf16"]
Sizes = tuple[Annotated[int, Strict()], Annotated[int, Strict()], Annotated[int, Strict()]]
"""The least, the usual and the greatest value of a dynamic size."""

EVERY = "*"
"""In a profile: each symbol that has no entry of its own."""

_Count = Annotated[int, Strict(), Field(ge=0)]
_Positive = Annotated[int, Strict(), Field(gt=0)]


class Settings(BaseModel):
    """How plans are built; each field is an option of the candidate.

    Attributes:
        precision: What matrix products and convolutions over float32 compute in.
        workspace_mib: Most scratch memory on the device that a layer may use, in MiB; by default
            all there is.
        optimization_level: 0 to 5, how long the builder looks for fast kernels; by default the
            library's own (3).
        max_aux_streams: How many further streams an engine may use.
        timing_cache: Whether the times of kernels are kept on disk for later builds.
        plan_cache: Whether plans are kept on disk, for later processes.
        refittable: Whether plans take other weights without being built anew; they are slower.
        weight_streaming_mib: How much of the weights stays on the device, in MiB, the rest being
            brought there at each call; by default all stays.
        profiles: Ranges of the dynamic sizes, each table one profile: name of a symbol, or ``*``,
            to least, usual and greatest value. By default one profile around the first call.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Precision = "fp32"
    workspace_mib: _Positive | None = None
    optimization_level: Annotated[int, Strict(), Field(ge=0, le=5)] | None = None
    max_aux_streams: _Count | None = None
    timing_cache: Annotated[bool, Strict()] = True
    plan_cache: Annotated[bool, Strict()] = True
    refittable: Annotated[bool, Strict()] = False
    weight_streaming_mib: _Count | None = None
    profiles: tuple[dict[str, Sizes], ...] = ()

    @field_validator("profiles")
    @classmethod
    def _ranges_are_ranges(cls, profiles: Any) -> Any:
        for index, profile in enumerate(profiles):
            for name, (least, usual, greatest) in profile.items():
                if not 0 < least <= usual <= greatest:
                    given = [least, usual, greatest]
                    raise ValueError(
                        f"profile {index}, {name!r}: {given} is not [least, usual, greatest]"
                    )
        return profiles


def read_settings(options: Mapping[str, Any]) -> Settings:
    """The candidate's options as settings.

    Raises:
        OptionError: naming every option that is unknown or malformed.
    """
    return read_options(Settings, options, "tensorrt")
