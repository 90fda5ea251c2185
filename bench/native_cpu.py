"""Engines for the CPU called by themselves, without torch.compile, as many threads as torch has.

OpenVINO reads what ``torch.export`` makes: its own converter keeps attention whole there, and takes
GPT-2 and Llama, which it does not by tracing (2026.4). Should it refuse, it is given what
``torch.onnx.export`` makes, as ONNX Runtime is, and the row says so.
"""

from __future__ import annotations

import io
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from compiles import Outputs, first_line
from torch import Tensor, nn

from composer.backends.onnxrt.library import onnxruntime

log = logging.getLogger("bench.native")

Inputs = Mapping[str, Tensor]


class Native(ABC):
    """A model in an engine of its own, made at the first call.

    ``via`` says what the engine was given, once it is made.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.via = ""
        self.run: Callable[[Inputs], Outputs] | None = None

    def __call__(self, **inputs: Tensor) -> Outputs:
        """Run it on numpy's view of the inputs."""
        if self.run is None:
            self.run = self.made(inputs)
        return self.run(inputs)

    @abstractmethod
    def made(self, inputs: Inputs) -> Callable[[Inputs], Outputs]:
        """The engine, ready to run such inputs."""


class OnnxRuntime(Native):
    """A session with ONNX Runtime's own defaults, but for the number of threads and ``entries``."""

    entries: ClassVar[Mapping[str, str]] = {}

    def made(self, inputs: Inputs) -> Callable[[Inputs], Outputs]:
        """From the public exporter."""
        package = onnxruntime()
        options = package.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        for key, value in self.entries.items():
            options.add_session_config_entry(key, value)
        providers = ["CPUExecutionProvider"]
        session = package.InferenceSession(self.model(inputs), options, providers=providers)
        self.via = "torch.onnx.export"

        def run(inputs: Inputs) -> Outputs:
            feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
            return tuple(map(torch.from_numpy, session.run(None, feeds)))

        return run

    def model(self, inputs: Inputs) -> bytes | str:
        """The model that the session runs, or its path."""
        return exported(self.module, inputs)


class OpenVino(Native):
    """A compiled model with OpenVINO's own defaults, but for threads and precision."""

    def __init__(self, module: nn.Module, precision: str) -> None:
        super().__init__(module)
        threads = torch.get_num_threads()
        hint = {"fp32": "f32", "bf16": "bf16"}[precision]
        self.settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}

    def made(self, inputs: Inputs) -> Callable[[Inputs], Outputs]:
        """By its own converter, or from ONNX. The outputs of a call are copies."""
        import openvino

        core = openvino.Core()
        model = self.prepared(self.model(core, inputs))
        compiled = core.compile_model(model, "CPU", self.settings)
        took = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        self.via += f", in {took}"  # float32 where the processor has no bfloat16
        request = compiled.create_infer_request()

        def run(inputs: Inputs) -> Outputs:
            feeds = [tensor.numpy() for tensor in inputs.values()]
            found = request.infer(feeds, share_inputs=True)
            return tuple(torch.from_numpy(each) for each in found.to_tuple())

        return run

    def model(self, core: Any, inputs: Inputs) -> Any:
        """What OpenVINO reads of the module."""
        import openvino

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                program = torch.export.export(self.module, (), dict(inputs), strict=False)
                model = openvino.convert_model(program)
                self.via = "torch.export"
            except Exception as error:  # noqa: BLE001  # the other way may do
                log.debug("OpenVINO's converter: %s", first_line(error))
                model = core.read_model(io.BytesIO(exported(self.module, inputs)))
                self.via = "torch.onnx.export"
        return model

    def prepared(self, model: Any) -> Any:
        """The model that is compiled."""
        return model


class KeptOnnxRuntime(OnnxRuntime):
    """A session that reads the file of an export in a folder; it makes one if there is none."""

    def __init__(self, module: nn.Module, folder: Path) -> None:
        super().__init__(module)
        self.path = folder / "model.onnx"

    def model(self, inputs: Inputs) -> str:
        """The path of the file."""
        if not self.path.exists():
            self.path.write_bytes(exported(self.module, inputs))
        return str(self.path)


class KeptOpenVino(OpenVino):
    """A model that is read from its file in a folder, with OpenVINO's own cache beside."""

    def __init__(self, module: nn.Module, folder: Path) -> None:
        super().__init__(module, "fp32")
        self.path = folder / "model.xml"
        self.settings["CACHE_DIR"] = str(folder / "cache")

    def model(self, core: Any, inputs: Inputs) -> Any:
        """The model; it makes the file if there is none."""
        import openvino

        if self.path.exists():
            return core.read_model(self.path)
        model = super().model(core, inputs)
        openvino.save_model(model, self.path, compress_to_fp16=False)
        return model


def kept(engine: str, module: nn.Module, folder: Path) -> Native:
    """The module in an engine that starts from what an earlier process left in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return (KeptOpenVino if engine == "openvino" else KeptOnnxRuntime)(module, folder)


def exported(module: nn.Module, inputs: Inputs) -> bytes:
    """The model by the public exporter, weights within."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, (), kwargs=dict(inputs), dynamo=True, verbose=False, input_names=[*inputs]
        )
    assert program is not None
    return bytes(program.model_proto.SerializeToString())
