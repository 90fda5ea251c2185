"""Options of ``openvino``, validated with an error that names the wrong option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator, model_validator

from composer.backends.onnx_engine import (
    did_you_mean,
    is_installed,
    unknown_among,
)

Precision = Literal["fp32", "bf16", "default"]

DEVICES = ("CPU", "GPU", "NPU")
"""OpenVINO's kinds of devices; one of several devices of a kind is called ``GPU.1``."""

_RESERVED = {"INFERENCE_PRECISION_HINT": "precision", "INFERENCE_NUM_THREADS": "threads"}
"""Properties that composer sets, and the option that sets each."""


class Settings(BaseModel):
    """How models are compiled; each field is an option of the candidate.

    Attributes:
        device: The device that OpenVINO runs on. The tensors of the graph are on the CPU in any
            case.
        threads: Number of CPU threads.
        precision: The precision in which float32 is computed. ``"default"`` leaves it to OpenVINO.
            ``None`` takes the field ``precision`` of the policy.
        keeps_nan: True if ``relu``, ``exp``, ``softmax`` and similar operations must return NaN for
            NaN.
        config: Further properties of OpenVINO, with values as text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = "CPU"
    threads: Annotated[int, Strict(), Field(gt=0)] = Field(default_factory=torch.get_num_threads)
    precision: Precision | None = None
    keeps_nan: Annotated[bool, Strict()] = False
    config: dict[str, str] = Field(default_factory=dict)

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        kind, _, index = device.partition(".")
        if kind not in DEVICES or (index and not index.isdecimal()):
            known = ", ".join(DEVICES)
            raise ValueError(f"unknown device{did_you_mean(kind, DEVICES)} (accepted: {known})")
        return device

    @model_validator(mode="after")
    def _check_config(self) -> Settings:
        reserved = [
            f"{name} (set {_RESERVED[name]!r})" for name in self.config if name in _RESERVED
        ]
        if reserved:
            raise ValueError(f"config: composer sets {', '.join(reserved)}")
        if self.config and is_installed("openvino"):  # else the engine's probe says that it is not
            _check_properties(self.device, self.config)
        return self


def _check_properties(device: str, config: Mapping[str, str]) -> None:
    """Check that the device has these properties and accepts their values.

    Raises:
        ValueError: it names the properties, or has the device's messages.
    """
    from composer.backends.openvino import library

    known = library.properties(device)
    if not known:  # no such device here, so nothing can be checked
        return
    wrong = unknown_among(config, known, f"{device} has no property")
    if wrong:
        raise ValueError(f"config: {wrong}")
    messages = library.complaints(device, config)
    if messages:
        raise ValueError(f"config: {'; '.join(messages)}")
