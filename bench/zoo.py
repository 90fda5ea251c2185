"""The public models that the benches and the tests run on.

Every model is a Hugging Face configuration with random weights, so nothing is downloaded. The
full size of each is chosen for tens of milliseconds a call in eager mode on two cores; the tiny
size has the same operators and takes a few milliseconds. Each captures as one graph.

    >>> module, inputs = build("bert")
    >>> outputs = module(**inputs)
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

Inputs = dict[str, Tensor]


class Example(NamedTuple):
    """A module in eval mode and the keyword arguments of one call of it.

    The module returns a tensor or a tuple of tensors; parameters and floating-point inputs are
    float32, token ids and masks int64.
    """

    module: nn.Module
    inputs: Inputs


class PlainOutputs(nn.Module):
    """A Hugging Face model that returns the named fields of its output, as plain tensors.

    One field gives a tensor, several a tuple. No key-value cache is built or returned.
    """

    def __init__(self, model: nn.Module, *fields: str) -> None:
        super().__init__()
        self.model = model
        self.fields = fields
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self.settings = {"use_cache": False} if takes_cache else {}

    def forward(self, **inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Call the model with its own keyword arguments."""
        output = self.model(**inputs, **self.settings)
        tensors = tuple(getattr(output, field) for field in self.fields)
        return tensors if len(tensors) > 1 else tensors[0]


def build(name: str, tiny: bool = False, seed: int = 0) -> Example:
    """Make the model called ``name``; the same weights and inputs for the same ``seed``.

    The global random state is left as it was.

    Raises:
        LookupError: no model has that name; a close one is suggested.
    """
    if name not in MODELS:
        raise LookupError(unknown(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, inputs = MODELS[name](tiny)
    return Example(module.eval(), inputs)


def unknown(name: str) -> str:
    """The sentence that says no model is called ``name``."""
    close = difflib.get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(MODELS)}"
    return f"no model is called {name!r}; {hint}"


def bert(tiny: bool) -> Example:
    """BERT base cut to 6 layers; one sequence of 128 tokens, the last quarter of it padding."""
    width, heads, tokens = (32, 2, 16) if tiny else (768, 12, 128)
    config = transformers.BertConfig(
        vocab_size=128 if tiny else 30522,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_hidden_layers=2 if tiny else 6,
    )
    model = transformers.BertModel(config)
    mask = torch.ones(1, tokens, dtype=torch.int64)
    mask[:, -tokens // 4 :] = 0
    inputs = token_ids(config.vocab_size, tokens) | {"attention_mask": mask}
    return Example(PlainOutputs(model, "last_hidden_state", "pooler_output"), inputs)


def distilbert(tiny: bool) -> Example:
    """DistilBERT base, of 6 layers; one sequence of 128 tokens."""
    width, heads, tokens = (32, 2, 16) if tiny else (768, 12, 128)
    config = transformers.DistilBertConfig(
        vocab_size=128 if tiny else 30522,
        dim=width,
        hidden_dim=4 * width,
        n_heads=heads,
        n_layers=2 if tiny else 6,
    )
    model = transformers.DistilBertModel(config)
    return Example(PlainOutputs(model, "last_hidden_state"), token_ids(config.vocab_size, tokens))


def gpt2(tiny: bool) -> Example:
    """GPT-2 small cut to 6 layers, with the language-model head; one sequence of 32 tokens."""
    width, heads, tokens = (32, 2, 16) if tiny else (768, 12, 32)
    config = transformers.GPT2Config(
        vocab_size=128 if tiny else 50257,
        n_embd=width,
        n_head=heads,
        n_layer=2 if tiny else 6,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    return Example(PlainOutputs(model, "logits"), token_ids(config.vocab_size, tokens))


def llama(tiny: bool) -> Example:
    """A small Llama with grouped queries (3 heads a key-value head); one sequence of 32 tokens."""
    width, heads, tokens = (48, 3, 16) if tiny else (768, 12, 32)
    config = transformers.LlamaConfig(
        vocab_size=128 if tiny else 16000,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3,
        head_dim=width // heads,
        num_hidden_layers=2 if tiny else 6,
    )
    model = transformers.LlamaForCausalLM(config)
    return Example(PlainOutputs(model, "logits"), token_ids(config.vocab_size, tokens))


def qwen2(tiny: bool) -> Example:
    """Qwen2.5-0.5B cut to 6 layers and 32,000 words, with its head; one sequence of 32 tokens."""
    width, heads, tokens = (56, 7, 16) if tiny else (896, 14, 32)
    config = transformers.Qwen2Config(
        vocab_size=128 if tiny else 32000,
        hidden_size=width,
        intermediate_size=2 * width if tiny else 4864,
        num_attention_heads=heads,
        num_key_value_heads=1 if tiny else 2,
        num_hidden_layers=2 if tiny else 6,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen2ForCausalLM(config)
    return Example(PlainOutputs(model, "logits"), token_ids(config.vocab_size, tokens))


def convnext(tiny: bool) -> Example:
    """ConvNeXt-T on one image of 224 x 224 pixels.

    The scale of each block starts at 1 and not at 1e-6: untrained, the blocks would otherwise add
    nothing to the result, and no error in them would be seen.
    """
    config = transformers.ConvNextConfig(
        depths=[1, 1, 1, 1] if tiny else [3, 3, 9, 3],
        hidden_sizes=[8, 16, 24, 32] if tiny else [96, 192, 384, 768],
        layer_scale_init_value=1.0,
    )
    model = transformers.ConvNextModel(config)
    return Example(PlainOutputs(model, "last_hidden_state", "pooler_output"), image(tiny))


def whisper_enc(tiny: bool) -> Example:
    """The encoder of Whisper tiny; 30 s of sound: 80 mel bands, 3000 frames of 10 ms."""
    width, heads, positions = (32, 2, 50) if tiny else (384, 6, 1500)
    config = transformers.WhisperConfig(
        vocab_size=128,
        d_model=width,
        encoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        encoder_layers=2 if tiny else 4,
        decoder_layers=1,
        decoder_attention_heads=heads,
        max_source_positions=positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperModel(config).get_encoder()
    inputs = {"input_features": torch.randn(1, config.num_mel_bins, 2 * positions)}
    return Example(PlainOutputs(model, "last_hidden_state"), inputs)


def swin(tiny: bool) -> Example:
    """Swin-T on one image of 224 x 224 pixels; the tiny one keeps a shifted window in stage 1."""
    config = transformers.SwinConfig(
        image_size=32 if tiny else 224,
        patch_size=2 if tiny else 4,
        window_size=4 if tiny else 7,
        embed_dim=16 if tiny else 96,
        depths=[2, 2] if tiny else [2, 2, 6, 2],
        num_heads=[2, 4] if tiny else [3, 6, 12, 24],
    )
    model = transformers.SwinModel(config)
    return Example(PlainOutputs(model, "last_hidden_state", "pooler_output"), image(tiny, 32))


def t5(tiny: bool) -> Example:
    """T5 small cut to 2 + 2 layers, with its head; 24 tokens for the encoder, 8 for the decoder."""
    width, heads, tokens = (32, 2, 12) if tiny else (512, 8, 24)
    config = transformers.T5Config(
        vocab_size=128 if tiny else 8000,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_heads=heads,
        num_layers=2,
        num_decoder_layers=2,
    )
    model = transformers.T5ForConditionalGeneration(config)
    decoder_ids = torch.randint(config.vocab_size, (1, tokens // 3))
    inputs = token_ids(config.vocab_size, tokens) | {"decoder_input_ids": decoder_ids}
    return Example(PlainOutputs(model, "logits"), inputs)


def resnet(tiny: bool) -> Example:
    """ResNet-50 with its classifier, on one image of 224 x 224 pixels."""
    config = transformers.ResNetConfig(
        embedding_size=8 if tiny else 64,
        hidden_sizes=[16, 32] if tiny else [256, 512, 1024, 2048],
        depths=[2, 2] if tiny else [3, 4, 6, 3],
    )
    config.num_labels = 10 if tiny else 1000
    model = transformers.ResNetForImageClassification(config)
    return Example(PlainOutputs(settled(model, tiny), "logits"), image(tiny))


def vit(tiny: bool) -> Example:
    """ViT-S/16 on one image of 224 x 224 pixels: 197 tokens of width 384."""
    width, heads = (32, 2) if tiny else (384, 6)
    config = transformers.ViTConfig(
        image_size=64 if tiny else 224,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_hidden_layers=2 if tiny else 12,
    )
    model = transformers.ViTModel(config)
    return Example(PlainOutputs(model, "last_hidden_state", "pooler_output"), image(tiny))


def dinov2(tiny: bool) -> Example:
    """DINOv2 ViT-S/14 on one image of 224 x 224 pixels: 257 tokens of width 384."""
    width, heads = (32, 2) if tiny else (384, 6)
    config = transformers.Dinov2Config(
        image_size=56 if tiny else 224,
        patch_size=14,
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=2 if tiny else 12,
    )
    model = transformers.Dinov2Model(config)
    return Example(PlainOutputs(model, "last_hidden_state", "pooler_output"), image(tiny, 56))


def mobilenet(tiny: bool) -> Example:
    """MobileNetV2 with its classifier, on one image of 224 x 224 pixels.

    The tiny one keeps all 17 blocks, since the configuration has no depth, at a tenth of the width.
    """
    config = transformers.MobileNetV2Config(
        image_size=64 if tiny else 224,
        depth_multiplier=0.1 if tiny else 1.0,
    )
    config.num_labels = 10 if tiny else 1000
    model = transformers.MobileNetV2ForImageClassification(config)
    return Example(PlainOutputs(settled(model, tiny), "logits"), image(tiny))


def token_ids(vocabulary: int, tokens: int) -> Inputs:
    """One sequence of random token ids, int64, shape ``(1, tokens)``."""
    return {"input_ids": torch.randint(vocabulary, (1, tokens))}


def image(tiny: bool, tiny_pixels: int = 64, batch: int = 1) -> Inputs:
    """Random square images, float32, shape ``(batch, 3, pixels, pixels)``; 224 pixels if full."""
    pixels = tiny_pixels if tiny else 224
    return {"pixel_values": torch.randn(batch, 3, pixels, pixels)}


def settled(model: nn.Module, tiny: bool) -> nn.Module:
    """Set the statistics of every batch norm to those of two random images, and return ``model``.

    Untrained, they are 0 and 1 and normalise nothing: activations shrink or grow from block to
    block, down to denormal numbers, which are slow and hide errors.
    """
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum, momentum = 1.0, norm.momentum
    with torch.no_grad():
        model.train()(**image(tiny, batch=2))
    for norm in norms:
        norm.momentum = momentum
    return model.eval()


MODELS: Mapping[str, Callable[[bool], Example]] = MappingProxyType(
    {
        factory.__name__: factory
        for factory in (
            bert, gpt2, llama, convnext, whisper_enc, swin, t5, resnet, vit, mobilenet,
            distilbert, dinov2, qwen2,
        )
    }
)  # fmt: skip
"""Name of the model -> factory that takes ``tiny``; use :func:`build`, which sets the seed."""
