"""LoRA beside Megatron's linear modules: the base is frozen, a pair of small factors per module is trained and saved.

The factors are called MODULE.adapter.linear_in (rank, in) and MODULE.adapter.linear_out (out, rank), as in Megatron-Bridge, and lie on one
tensor-parallel rank only: this is for looking at how adapters are resumed, not for training large ones.
"""

from __future__ import annotations

from typing import Any

import torch

from ..settings import ALPHA, RANK

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Factors(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """scale * linear_out(linear_in(x)): what the adapter adds to the output of its module."""

    def __init__(self, width: int, height: int, dtype: Any) -> None:
        super().__init__()
        self.linear_in = torch.nn.Linear(width, RANK, bias=False, dtype=dtype)
        self.linear_out = torch.nn.Linear(RANK, height, bias=False, dtype=dtype)

    def forward(self, x: Any) -> Any:
        """x (..., in) -> (..., out)."""
        return self.linear_out(self.linear_in(x)) * (ALPHA / RANK)


def adapt(model: Any) -> None:
    """Freeze the model and give each target module its factors, whose product is added to what the module returns."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] not in TARGETS:
            continue
        height, width = module.weight.shape
        module.adapter = Factors(width, height, module.weight.dtype).to(module.weight.device)
        for parameter in module.adapter.parameters():
            parameter.allreduce = getattr(module.weight, "allreduce", True)  # false for experts on several ranks
        module.register_forward_hook(_add)


def _add(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    """Megatron's linear modules return (output, bias)."""
    return output[0] + module.adapter(inputs[0]), *output[1:]


def is_factor(name: str) -> bool:
    """Whether a key of a state dict is a factor's."""
    return ".adapter." in name
