"""The ways in which the weight of a sequence's first layer, of 16 x 8 numbers, changes."""

from __future__ import annotations

import torch


def update_in_place(model) -> None:
    model[0].weight.mul_(2)


def load_state_dict(model) -> None:
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})


def replace_parameter(model) -> None:
    model[0].weight = torch.nn.Parameter(torch.randn(16, 8))


def assign_data(model) -> None:
    model[0].weight.data = torch.randn(16, 8)


def swap(model) -> None:
    torch.utils.swap_tensors(model[0].weight, torch.nn.Parameter(torch.randn(16, 8)))


CHANGES = [update_in_place, load_state_dict, replace_parameter, assign_data, swap]
