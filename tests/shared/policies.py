"""Files of policies, and a model that is compiled under them."""

from __future__ import annotations

from pathlib import Path

import torch
from common import compiled, last

from composer.policy import Facts

GRAPH = Facts("Net", "cpu", "float32", training=False, dynamic=False)


class Encoder(torch.nn.Module):
    def forward(self, x):
        return torch.cos(x)


def write(text: str, name: str = "composer.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path.absolute()


def run(module=None, **options):
    x = torch.ones(2)
    compiled(module or Encoder(), **options)(x)
    return last()


EAGER = '[defaults]\nchain = ["eager"]\n'


def free_function(x):
    return torch.sin(x)
