"""Options of composer's own TensorRT engine, validated with an error that names the wrong one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator

Precision = Literal["fp32", "fp16", "bf16"]
Sizes = tuple[Annotated[int, Strict()], Annotated[int, Strict()], Annotated[int, Strict()]]
"""The least, the usual and the greatest value of a dynamic size."""

EVERY = "*"
"""In a profile: each symbol without an entry of its own."""

_Count = Annotated[int, Strict(), Field(ge=0)]
_Positive = Annotated[int, Strict(), Field(gt=0)]


class Settings(BaseModel):
    """How plans are built; each field is an option of the candidate.

    Attributes:
        precision: The precision of matrix products and convolutions over float32.
        workspace_mib: Most scratch memory on the device for one layer, in MiB; by default all
            memory.
        optimization_level: How long the builder looks for fast kernels, from 0 to 5; by default the
            library's own level (3).
        max_aux_streams: How many additional streams an engine may use.
        timing_cache: True to keep the times of kernels on disk for later builds.
        plan_cache: True to keep plans on disk for later processes.
        refittable: True if plans can take new weights without a new build; they are slower.
        weight_streaming_mib: How much of the weights stays on the device, in MiB; by default all.
            The rest is copied to the device at each call.
        profiles: Ranges of the dynamic sizes, one table for each profile. A table maps the name of
            a symbol, or ``*``, to its least, usual and greatest value. By default there is one
            profile around the sizes of the first call.
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
                    sizes = [least, usual, greatest]
                    raise ValueError(
                        f"profile {index}, {name!r}: {sizes} is not [least, usual, greatest]"
                    )
        return profiles
