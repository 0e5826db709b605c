"""Optimizer state of two Megatron checkpoints under the names of the parameters, however each stores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CkptError
from ..formats.pickles import TensorSpec
from ..inspection.overview import Opened
from ..notes import Note
from ..optimizer.reading import read_optimizer
from ..optimizer.state import OptimizerState, repad_state, scalar
from ..tensors import TensorMetadata
from ..views import as_mcore
from .result import Unlike

# Of a parameter group: what the next step computes with. The rest tells which parameters it holds, or how the run was started.
GROUP_VALUES = ("lr", "weight_decay", "betas", "eps", "step", "wd_mult", "lr_mult", "max_lr", "min_lr", "start_wd", "end_wd")


def optimizer_side(opened: Opened, family: str | None) -> tuple[dict[str, TensorMetadata], OptimizerState]:
    """("exp_avg/decoder..." -> tensor without vocabulary padding, the state). Errors: E571 there is none, those of read_optimizer."""
    checkpoint = opened.state
    where = checkpoint.location.directory
    if checkpoint.format == "hf":
        raise CkptError("E571", "an HF folder holds no optimizer state", where=where, hint="leave out --optimizer")
    view = as_mcore(checkpoint, family=family)
    state = read_optimizer(checkpoint, view)
    if state.kind == "none":
        raise CkptError("E571", "there is no optimizer state in this checkpoint", where=where, hint="leave out --optimizer")
    vocab = int(view.args.get("vocab_size") or view.dims.padded_vocab)
    kept = repad_state(state, vocab, vocab)
    return {f"{name}/{n}": t for name, named in kept.tensors.items() for n, t in named.items()}, state


def compare_training(a: OptimizerState, b: OptimizerState) -> tuple[list[Unlike], list[Note]]:
    """Step count, values of parameter groups and scheduler that differ; notes that the two ways of storing need."""
    found = []
    if a.step != b.step:
        found.append(Unlike("optimizer step", str(a.step), str(b.step)))
    groups_a, groups_b = _groups(a), _groups(b)
    if len(groups_a) != len(groups_b):
        found.append(Unlike("parameter groups", str(len(groups_a)), str(len(groups_b))))
    for number, (x, y) in enumerate(zip(groups_a, groups_b, strict=False)):
        found += [Unlike(f"group {number} {k}", str(x[k]), str(y[k])) for k in sorted(x.keys() & y.keys()) if x[k] != y[k]]
    found += _scheduler(a.scheduler or {}, b.scheduler or {})
    kinds = [Note("kept", "optimizer", f"stored as {a.kind} in A and as {b.kind} in B")] if a.kind != b.kind else []
    return found, kinds + [n for state in (a, b) for n in (*state.problems, *(n for n in state.notes if n.kind == "warning"))]


def _groups(state: OptimizerState) -> list[dict[str, Any]]:
    made = []
    for group in state.groups:
        made.append({k: _plain(group[k]) for k in GROUP_VALUES if k in group})
    return sorted(made, key=lambda g: str(sorted(g.items())))


def _scheduler(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Unlike]:
    return [
        Unlike(f"scheduler {k}", str(_plain(a[k])), str(_plain(b[k])))
        for k in sorted(a.keys() & b.keys(), key=str)
        if _plain(a[k]) != _plain(b[k])
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return scalar(value)
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    return value
