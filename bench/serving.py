"""The models of ``bench/gpu.py`` at serving sizes, and what each should give, in float64.

The public models of :mod:`zoo` need transformers. Two written with torch alone stand in where
it is not there.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from compiles import Outputs, flat
from torch import Tensor, nn
from torch.nn import functional

from composer.chain.verify.double import in_double
from composer.graphs.capture import read_request
from composer.passes.resolve import SharedPasses

Inputs = dict[str, Tensor]

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
)


@dataclass(frozen=True, slots=True)
class Size:
    """How many requests make a batch, and how many times as long a sequence is as in the zoo."""

    batch: int
    longer: int = 1


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "bert": Size(32),
        "resnet": Size(64),
        "llama": Size(8, longer=8),
        "vit": Size(64),
        "gpt2": Size(8, longer=8),
        "convnext": Size(32),
        "whisper_enc": Size(8),
        "t5": Size(16, longer=4),
        "swin": Size(32),
        "mobilenet": Size(64),
    }
)
"""The public models in the order in which they are measured: 128 tokens for BERT, 256 for Llama and
GPT-2, 96 and 32 for T5, 30 s of sound for Whisper, images of 224 x 224 pixels."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on its device in one dtype, the keyword arguments of a call, what it should give.

    ``exact`` are the outputs in float64, from weights and inputs as ``dtype`` holds them;
    ``given`` are eager's own.
    """

    name: str
    dtype: str
    batch: int
    module: nn.Module
    inputs: Inputs
    given: Outputs
    exact: Outputs


class Block(nn.Module):
    """Attention and a feed-forward net, each on normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is (batch, tokens, width), and so is what comes out."""
        parts = self.mixed(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.norms[1](x))))


def plain_encoder(tiny: bool) -> tuple[nn.Module, Inputs]:
    """Twelve blocks of width 768 over 128 tokens, one sequence."""
    width, heads, tokens, depth = (32, 2, 16, 1) if tiny else (768, 12, 128, 12)
    module = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
    return module, {"input": torch.randn(1, tokens, width)}


def plain_convnet(tiny: bool) -> tuple[nn.Module, Inputs]:
    """Eight convolutions, each with batch norm and ReLU, and a classifier; one image."""
    widths = (3, 8, 16) if tiny else (3, 64, 64, 128, 128, 256, 256, 512, 512)
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(itertools.pairwise(widths)):
        convolution = nn.Conv2d(before, after, 3, stride=1 + index % 2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000))
    pixels = 32 if tiny else 224
    return nn.Sequential(*layers, *pooled), {"input": torch.randn(1, 3, pixels, pixels)}


PLAIN: Mapping[str, Callable[[bool], tuple[nn.Module, Inputs]]] = MappingProxyType(
    {"plain_encoder": plain_encoder, "plain_convnet": plain_convnet}
)
MODELS = (*SIZES, *PLAIN)


@functools.cache
def built(name: str, tiny: bool) -> tuple[nn.Module, Inputs]:
    """The model with float32 weights on the CPU, and inputs of one request; made once.

    Raises:
        ImportError: it is a public model, and transformers is not here.
    """
    if name in PLAIN:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module, inputs = PLAIN[name](tiny)
        return module.eval(), inputs
    import zoo  # needs transformers

    return zoo.build(name, tiny)


def batched(inputs: Inputs, size: Size) -> Inputs:
    """A batch of requests that differ: each is the one before, moved on by one place."""
    made = {}
    for name, tensor in inputs.items():
        longer = tensor.repeat(1, size.longer) if tensor.dim() == 2 else tensor
        steps = range(size.batch) if "mask" not in name else [0] * size.batch
        made[name] = torch.cat([longer.roll(step, -1) for step in steps])
    return made


def subject(name: str, dtype: str, device: torch.device, tiny: bool) -> Subject:
    """The model as it is measured; call it where no gradients are recorded.

    Raises:
        Exception: whatever building, moving or running it raises.
    """
    master, request = built(name, tiny)
    size = Size(2) if tiny else SIZES.get(name, Size(32))
    module = copy.deepcopy(master).to(device, DTYPES[dtype])
    inputs = {key: moved(each, device, dtype) for key, each in batched(request, size).items()}
    given = flat(module(**inputs))
    exact = flat(torch.compile(module, backend=in_float64)(**inputs))
    torch.compiler.reset()
    return Subject(name, dtype, size.batch, module, inputs, given, exact)


def moved(tensor: Tensor, device: torch.device, dtype: str) -> Tensor:
    """The tensor on the device; in the dtype, if it holds floating-point numbers."""
    return tensor.to(device, DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype)


def in_float64(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A Dynamo backend that computes in float64 even where the model asks for float32."""
    request = read_request(gm, example_inputs, mode=None)

    def run(*args: Any) -> Any:
        wide, inputs, _ = in_double(request, args, SharedPasses())
        return wide(*inputs)

    return run
