"""The optimizer state of a checkpoint as ckpt holds it, and what every reader of one shares: steps, groups, values, checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..dtypes import dtype
from ..formats.pickles import NumpyScalar, TensorRef, TensorSpec
from ..formats.torch_zip import TorchFile
from ..model_names import TABLES
from ..notes import Note
from ..tensors import TensorMetadata
from .groups import Group, Steps
from .order import is_parameter
from .values import compare_masters

MASTER = "param"  # the float32 weights; Megatron also says fp32_param, master_param
_MASTERS = ("fp32_param", "master_param")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Optimizer state under canonical names.

    kind       how it was stored: "fully_reshardable", "fully_sharded_model_space", "float16" / "float32" (not distributed),
               "dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter", "distrib_optim" (legacy), or "none".
    tensors    state ("exp_avg", "exp_avg_sq", "param" = float32 weights) -> canonical name of the parameter -> its tensor.
    groups     parameter groups with all their values but `params`; each identity once.
    step       optimizer steps taken, or None when nothing says it.
    scheduler, grad_scaler   as stored, small tensors as TensorSpec with their bytes; None when absent.
    notes      what a person must know;   problems  what makes the state doubtful.
    """

    kind: str
    tensors: dict[str, dict[str, TensorMetadata]]
    groups: tuple[Group, ...] = ()
    step: int | None = None
    scheduler: dict[str, Any] | None = None
    grad_scaler: Any = None
    notes: tuple[Note, ...] = ()
    problems: tuple[Note, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for named in self.tensors.values() for t in named.values())


def canonical_state(state: str) -> str:
    """The name ckpt gives a state: the float32 weights are `param` however they are called."""
    return MASTER if state in _MASTERS else state


def masters_note(tensors: Mapping[str, Mapping[str, TensorMetadata]], weights: Mapping[str, TensorMetadata]) -> list[Note]:
    """A problem when float32 weights do not round to the model's weights (256 elements of each are compared)."""
    masters = tensors.get(MASTER)
    if not masters:
        return []
    wrong = compare_masters(masters, weights)
    if not wrong:
        return []
    worst = max(wrong, key=lambda m: m.largest)
    names = ", ".join(m.name for m in wrong[:8]) + (", ..." if len(wrong) > 8 else "")
    text = (
        f"the optimizer's float32 weights of {len(wrong)} of {len(masters)} parameters do not round to the model's weights "
        f"(by up to {worst.largest:g} in {worst.name}): the first training step would go on from other weights"
    )
    return [Note("warning", names, text)]


def missing_notes(tensors: Mapping[str, Mapping[str, TensorMetadata]], weights: Mapping[str, TensorMetadata]) -> list[Note]:
    """Parameters of the model without optimizer state (frozen in training)."""
    notes = []
    for state, named in tensors.items():
        lacking = [n for n in weights if n not in named and is_parameter(n)]
        if lacking:
            text = f"{len(lacking)} parameters have no {state}: they were not trained"
            notes.append(Note("warning", ", ".join(lacking[:8]), text))
    return notes


def repad_state(state: OptimizerState, vocab: int, rows: int) -> OptimizerState:
    """The state with vocabulary tables of `rows` rows, the first `vocab` kept and zeros after them, as vocabulary.repad does."""
    tensors = {
        s: {n: t.with_rows(vocab, rows) if n in TABLES and t.global_shape[0] != rows else t for n, t in named.items()}
        for s, named in state.tensors.items()
    }
    return replace(state, tensors=tensors)


def entries(value: Any) -> Iterator[tuple[int, Any]]:
    """(number, state dict) of each optimizer: one, or a table or list of several."""
    if isinstance(value, dict) and value and all(type(k) is int for k in value):
        yield from sorted(value.items())
    elif isinstance(value, list):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield 0, value


def collect(place: str, entry: Any, file: TorchFile | None, lists: list[tuple[str, list[Any]]], steps: Steps, scalers: list[Any]) -> None:
    """Add one optimizer's groups, step counts and grad scaler; `entry` as Megatron's optimizers return it from state_dict()."""
    if not isinstance(entry, dict):
        return
    inner = entry.get("optimizer", entry.get("optimizer_state_dict", entry))
    if isinstance(inner, dict):
        groups = inner.get("param_groups")
        if isinstance(groups, list):
            listed = [with_bytes(g, file) for g in groups if isinstance(g, dict)]
            lists.append((place, listed))
            for group in listed:
                steps.add("in param_groups", number_of(group.get("step"), file))
        state = inner.get("state")
        if isinstance(state, dict):
            steps.add("in common_step", number_of(state.get("common_step"), file))
            for one in state.values():
                if isinstance(one, dict):
                    steps.add("per parameter", number_of(one.get("step"), file))
    held = entry.get("param_state")
    if isinstance(held, dict):
        for one in held.values():
            if isinstance(one, dict):
                steps.add("per parameter", number_of(one.get("step"), file))
    if entry.get("grad_scaler") is not None:
        scalers.append(with_bytes(entry["grad_scaler"], file))


def number_of(value: Any, file: TorchFile | None) -> Any:
    """A number from a Python number, a numpy scalar or a tensor of one element; anything else gives None."""
    if isinstance(value, NumpyScalar):
        return value.item()
    if isinstance(value, TensorRef) and file is not None:
        value = with_bytes(value, file)
    return scalar(value)


def scalar(value: Any) -> Any:
    """A number from a Python number or a TensorSpec of one element."""
    if isinstance(value, TensorSpec) and value.data:
        import numpy as np

        kind = dtype(value.dtype)
        if len(value.data) != kind.itemsize:
            return None
        found = np.frombuffer(value.data, kind.to_numpy())[0].item()
        return found if isinstance(found, int | float) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def with_bytes(value: Any, file: TorchFile | None) -> Any:
    """A plain value with its small tensors (references into `file`) replaced by tensors that carry their bytes."""
    if isinstance(value, TensorRef):
        if file is None or prod(value.shape) > 4096:
            return None
        return TensorSpec(value.dtype, value.shape, file.read(value))
    if type(value) is dict:
        return {k: with_bytes(v, file) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_bytes(v, file) for v in value)
    return value
