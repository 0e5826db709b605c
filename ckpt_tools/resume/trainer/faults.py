"""Mistakes that loaders have made, to be made on purpose: each must be seen by the comparison, or the comparison proves nothing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .checkpointing import Run
from .optimizer import change, set_steps

_LEFT_OUT = {"drop-optimizer": "optimizer", "drop-scheduler": "scheduler", "drop-rng": "rng"}


@dataclass(frozen=True, slots=True)
class Fault:
    """The mistake `name`, or none (None)."""

    name: str | None

    def restores(self, part: str) -> bool:
        """Whether the loader restores the optimizer, the scheduler, the rng."""
        return self.name is None or _LEFT_OUT.get(self.name) != part

    def after(self, run: Run) -> None:
        """What goes wrong after everything was loaded. Every rank calls it."""
        if self.name == "drop-step":
            set_steps(run.optimizer, 0)
        elif self.name == "skip-sample":
            run.consumed += 1
        elif self.name == "stale-master":
            change(run.optimizer, _stale(run))
        elif self.name == "shift-moments":
            change(run.optimizer, _shifted)
        elif self.name == "swap-gate-up":
            with torch.no_grad():
                for model in run.chunks:
                    for name, parameter in model.named_parameters():
                        if name.endswith("linear_fc1.weight"):
                            parameter.copy_(_swapped(parameter))
            gated = {id(p) for model in run.chunks for n, p in model.named_parameters() if n.endswith("linear_fc1.weight")}
            change(run.optimizer, lambda entries: _swap_masters(entries, gated))


def _swapped(tensor: Any) -> Any:
    return torch.cat(list(reversed(tensor.detach().clone().chunk(2))))


def _swap_masters(entries: list[tuple[Any, dict[str, Any]]], gated: set[int]) -> None:
    for parameter, states in entries:
        if id(parameter) in gated and "master" in states:
            states["master"].copy_(_swapped(states["master"].view(parameter.shape)).view_as(states["master"]))


def _stale(run: Run) -> Any:
    """The float32 weights about as they were one step earlier."""

    def alter(entries: list[tuple[Any, dict[str, Any]]]) -> None:
        for _, states in entries:
            if "master" not in states:
                raise ValueError("weights in float32 have no master copy that could be stale")
            states["master"].add_(1e-3 * states["exp_avg"] / (states["exp_avg_sq"].sqrt() + 1e-8))

    return alter


def _shifted(entries: list[tuple[Any, dict[str, Any]]]) -> None:
    """The moments of each parameter are those of the next one of the same shape."""
    alike: dict[Any, list[dict[str, Any]]] = {}
    for parameter, states in entries:
        alike.setdefault(tuple(parameter.shape), []).append(states)
    for group in alike.values():
        for name in ("exp_avg", "exp_avg_sq"):
            first = group[0][name].clone()
            for here, following in pairwise(group):
                here[name].copy_(following[name])
            group[-1][name].copy_(first)
