"""Parameter groups and step counts: what an optimizer holds besides tensors, matched by what it means and never by its position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CkptError
from ..model_names import EMBEDDING, HEAD
from ..notes import Note

# Megatron finds a group by these keys (0.16: optimizer.py param_group_identifier_keys); a group that lacks one has the neutral value.
IDENTITY: dict[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
FINER = ("max_lr", "min_lr", "start_wd", "end_wd", "optimizer")  # added to them in 0.19
Identity = tuple[Any, ...]
Group = dict[str, Any]


def identity(group: Mapping[str, Any]) -> Identity:
    """What tells a group from the others. NeMo says pre_wd_mult and pre_lr_mult."""
    main = tuple(group[k] if k in group else group.get(f"pre_{k}", neutral) for k, neutral in IDENTITY.items())
    return (*main, *(_plain(group.get(k)) for k in FINER))


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else None


@dataclass(slots=True)
class Steps:
    """Where the step count was found: place -> values."""

    found: dict[str, set[float]] = field(default_factory=dict)

    def add(self, place: str, value: Any) -> None:
        """Note a count; what is no number is ignored."""
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53:
            self.found.setdefault(place, set()).add(float(value))

    def decide(self) -> tuple[int | None, list[Note]]:
        """The step, and a note when places disagree: the largest counts, since a stale one was left behind by a dummy first step or by a
        loader that began again at 0."""
        values = set().union(*self.found.values()) if self.found else set()
        if not values:
            return None, []
        step = int(max(values))
        if len(values) == 1:
            return step, []
        told = ", ".join(f"{_values(v)} {place}" for place, v in self.found.items())
        return step, [Note("warning", "optimizer step", f"the step is stored as {told}; {step} was taken and is written in every place")]


def _values(values: set[float]) -> str:
    return " and ".join(f"{v:g}" for v in sorted(values)[:4])


def merge_groups(lists: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> tuple[list[Group], list[Note]]:
    """The groups of several ranks as one list, each identity once, `params` left out; `lists`: (rank's name, its groups).

    Groups of the same identity whose other values differ between ranks give a note: the first rank's count.
    """
    merged: dict[Identity, Group] = {}
    differing: dict[str, str] = {}
    for rank, groups in lists:
        for group in groups:
            kept = {k: v for k, v in group.items() if k != "params"}
            first = merged.setdefault(identity(group), kept)
            for key in kept.keys() | first.keys():
                if key != "step" and kept.get(key) != first.get(key):
                    differing.setdefault(str(key), rank)
    notes = [
        Note("warning", f"param_groups.{key}", f"{rank} has another value than the ranks before it, whose value was kept")
        for key, rank in sorted(differing.items())
    ]
    return list(merged.values()), notes


def completed(groups: Sequence[Mapping[str, Any]], scheduler: Mapping[str, Any] | None) -> tuple[list[Group], list[Note]]:
    """The groups with every key that Megatron 0.13 to 0.19 looks groups up by; each key that was added is said."""
    result, added = [], set()
    for group in groups:
        full = dict(group)
        neutral = {**IDENTITY, "default_config": not group.get("is_decoupled_lr", False)}
        for key in ("max_lr", "min_lr"):  # the values every group has that was not given its own
            if scheduler is not None and not group.get("is_decoupled_lr") and isinstance(scheduler.get(key), int | float):
                neutral[key] = scheduler[key]
        for key, value in neutral.items():
            if key not in full and f"pre_{key}" not in full:
                full[key] = value
                added.add(f"{key}={value}")
        result.append(full)
    text = "added to the parameter groups that lacked it, because a newer Megatron-Core looks groups up by it"
    return result, [Note("assumed", f"param_groups {', '.join(sorted(added))}", text)] if added else []


def expert_split(groups: Sequence[Group], experts_apart: bool) -> tuple[list[Group], list[Note]]:
    """The groups as a run has them whose experts are, or are not, optimized apart from the dense parameters (is_expert_parallel)."""
    if not experts_apart:
        kept = [g for g in groups if not g.get("is_expert_parallel")]
        for group in groups:
            alike = {**group, "is_expert_parallel": False}
            if identity(alike) not in {identity(g) for g in kept}:
                kept.append(alike)
        lost = len(groups) - len(kept)
        return kept, [
            Note("dropped", "param_groups", f"{lost} groups of experts: without expert parallelism they join the others")
        ] if lost else []
    if any(g.get("is_expert_parallel") for g in groups):
        return list(groups), []
    # Megatron makes the same groups for experts, and leaves out those without parameters on every rank: norms and biases
    made = [{**g, "is_expert_parallel": True} for g in groups if g.get("wd_mult", 1.0) != 0.0 and not g.get("is_decoupled_lr")]
    return [*groups, *made], [
        Note("assumed", "param_groups", f"{len(made)} groups of experts were made as copies of those of the other matrices")
    ]


def undecayed(name: str, axes: int, args: Mapping[str, Any] | None = None) -> bool:
    """Whether a parameter gets no weight decay: vectors and biases (except q and k norms with --apply-wd-to-qk-layernorm)."""
    if (args or {}).get("apply_wd_to_qk_layernorm") and name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        return False
    return axes < 2 or name.endswith(".bias")


def group_number(
    name: str, axes: int, expert_parallel: bool, groups: Sequence[Mapping[str, Any]], args: Mapping[str, Any] | None = None
) -> int:
    """Position of the group that a parameter belongs to. CkptError E227 when no group, or more than one, can be it."""
    undecay = undecayed(name, axes, args)
    embedding = name in (EMBEDDING, HEAD)
    fitting = [i for i, g in enumerate(groups) if bool(g.get("is_expert_parallel", False)) == expert_parallel]
    if any(groups[i].get("is_decoupled_lr") for i in fitting):
        fitting = [i for i in fitting if bool(groups[i].get("is_decoupled_lr", False)) == embedding]
    decays = {i: groups[i].get("wd_mult", groups[i].get("pre_wd_mult", 1.0)) for i in fitting}
    chosen = [i for i in fitting if (decays[i] == 0.0) == undecay] if len(set(decays.values())) > 1 else fitting
    if len(chosen) != 1:
        raise CkptError(
            "E227",
            f"which parameter group {name} belongs to cannot be told",
            where=name,
            found=f"{len(chosen)} of {len(groups)} groups fit: {[identity(groups[i]) for i in chosen][:4]}",
            hint="the groups were not made by Megatron's own rules (weight decay off for vectors and biases, decoupled embedding rate)",
        )
    return chosen[0]
