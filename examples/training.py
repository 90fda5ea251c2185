"""Train a small model: an engine runs forward and backward, after a check against eager."""

from __future__ import annotations

import argparse

import torch

import composer

OPTIONS = {
    "chain": ["inductor", "onnxrt"],  # the engines to try, in order
    "verify": "compile",  # outputs and gradients are compared with eager before an engine serves
    "isolate": True,  # a crash in an engine ends a child process, and not the training
}


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points in a plane, labelled 1 inside of the unit circle and 0 outside."""
    points = torch.randn(steps, 64, 2)
    return [(x, (x.norm(dim=1) < 1).long()) for x in points]


def main() -> None:
    """Train, print the loss now and then, and say which engine ran the graphs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    compiled = torch.compile(model, backend="composer", options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for step, (x, label) in enumerate(batches(steps)):
        loss = torch.nn.functional.cross_entropy(compiled(x), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, steps - 1) or step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    print(composer.report())


if __name__ == "__main__":
    main()
