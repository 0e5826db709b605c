"""What a validated checkpoint holds and where: weights, optimizer, schedule, random states."""

from __future__ import annotations

from dataclasses import dataclass

from ..megatron_target import has_optimizer
from ..optimizer.kinds import optimizer_state, rest_of_state
from .subject import Subject


@dataclass(frozen=True, slots=True)
class Holdings:
    """weights  "safetensors", "megatron", "both" or "none";   optimizer  kind or "none";   scheduler, random  whether they are there;
    family  of the model, "" when unknown."""

    weights: str
    optimizer: str
    scheduler: bool
    random: bool
    family: str


def holdings(subject: Subject) -> Holdings | None:
    """None when nothing could be opened."""
    if subject.location is None:
        return None
    beside = subject.hf is not None and bool(subject.hf.tensors)
    inside = bool(subject.weights_in_state)
    weights = "both" if beside and inside else "safetensors" if beside else "megatron" if inside else "none"
    kind, random = "none", False
    if subject.state is not None:
        kind = optimizer_state(subject.state).kind if subject.state.format != "torch" else "none"
        if kind == "none" and has_optimizer(subject.state):
            kind = subject.optimizer.kind if subject.optimizer is not None else "legacy"
        random = bool(rest_of_state(subject.state).rng_objects) or "rng_state" in subject.common
    scheduler = any(isinstance(subject.common.get(k), dict) for k in ("opt_param_scheduler", "lr_scheduler"))
    family = next((m.family.name for m in subject.models if m.family is not None), "")
    return Holdings(weights, kind, scheduler, random, family)
