"""Everything that the headers of a checkpoint tell: what `ckpt inspect` shows, as data.

opened = open_for_inspection("runs/llama")
found = inspect(opened)
found.weights.parameters, found.optimizer.reshardable
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..adapters.facts import AdapterFacts, adapter_facts
from ..checkpoint import EXTRA_STATE, Checkpoint, open_location
from ..dtypes import DTYPES
from ..errors import CkptError
from ..formats import hf as hf_format
from ..formats.torch_dist import TorchDist
from ..location import Location, locate
from ..optimizer.kinds import OptimizerState, Rest, optimizer_state, rest_of_state
from ..tensors import TensorMetadata
from .model import Model, describe
from .tensors import Kind, fold
from .writer import Writer, written_by


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A checkpoint to look at. state: what the iteration (or HF) folder holds; beside: safetensors weights that belong to it, or None."""

    state: Checkpoint
    beside: Checkpoint | None

    @property
    def model(self) -> Checkpoint:
        """The checkpoint whose weights are looked at: the state's own, else those beside it."""
        return self.beside if self.beside is not None and not self.state.weights else self.state

    @property
    def twice(self) -> bool:
        """Whether the weights are stored in both formats."""
        return self.beside is not None and bool(self.state.weights)

    @property
    def tensors(self) -> dict[str, TensorMetadata]:
        """Weights and optimizer state, each stored tensor once."""
        if self.model is self.state:
            return self.state.tensors
        return {**self.model.tensors, **self.state.tensors}

    def of_weights(self) -> tuple[dict[str, TensorMetadata], bool]:
        """(weights, whether they have HF names)."""
        return self.model.weights, self.model.format in ("hf", "peft")

    def of_optimizer(self) -> dict[str, TensorMetadata]:
        """Optimizer state."""
        kept = self.state.weights
        return {n: t for n, t in self.state.tensors.items() if n not in kept}


@dataclass(frozen=True, slots=True)
class DTypeTotal:
    """Tensors of one dtype: how many are stored, their elements and bytes."""

    dtype: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """Weights of a checkpoint: format and folder they lie in, stored tensors, elements, bytes, and the same by dtype (largest first)."""

    format: str
    directory: str
    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[DTypeTotal, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the headers tell. copies: both copies of weights stored twice (else empty), with wasted_bytes = the smaller; extra_state:
    helper entries that are no weights; kinds: the tensors folded over layers; adapter: what a PEFT folder changes, else None."""

    location: Location
    format: str
    weights: Share
    copies: tuple[Share, ...]
    wasted_bytes: int
    model: Model | None
    optimizer: OptimizerState
    rest: Rest
    writer: Writer
    extra_state: int
    kinds: tuple[Kind, ...]
    warnings: tuple[str, ...]
    adapter: AdapterFacts | None = None


def open_for_inspection(path: str | os.PathLike[str], iteration: str | int = "latest") -> Opened:
    """Open a checkpoint to look at it: without a tracker the newest complete iteration is taken, trailing bytes in a safetensors file are
    a warning, and safetensors weights beside an iteration folder are opened too.

    Errors: those of open_checkpoint; E218 when a shape is larger than any file.
    """
    place = locate(os.fspath(path), iteration, allow_untracked=True)
    with _no_collections():
        if place.format == "hf":
            return Opened(_open_hf(place), None)
        state = open_location(place)
        _check_sizes(state)
        if place.weights is None:
            return Opened(state, None)
        try:
            return Opened(state, _open_hf(replace(place, directory=place.weights, format="hf", warnings=())))
        except CkptError as error:
            if not state.weights:
                raise
            said = f"the safetensors beside it cannot be read: {error.what} ({error.where})"
            return Opened(replace(state, warnings=(*state.warnings, said)), None)


def _check_sizes(checkpoint: Checkpoint) -> None:
    for tensor in checkpoint.tensors.values():
        if tensor.numel >= 2**60:
            where = f"{checkpoint.location.directory}: {tensor.fqn}"
            raise CkptError("E218", "the index gives a tensor an impossible shape", where=where, found=str(list(tensor.global_shape))[:200])


@contextmanager
def _no_collections() -> Iterator[None]:
    # Hundreds of thousands of new objects and no garbage among them: collections would take half of the time that opening takes.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _open_hf(place: Location) -> Checkpoint:
    folder = hf_format.open_hf(place.directory, tolerant=True)
    return Checkpoint(place, "hf", folder.tensors, folder.config, details=folder, warnings=(*place.warnings, *folder.warnings))


def inspect(opened: Opened) -> Inspection:
    """What the headers tell; no tensor byte is read."""
    with _no_collections():
        return _inspect(opened)


def _inspect(opened: Opened) -> Inspection:
    state, model = opened.state, opened.model
    weights, hf = opened.of_weights()
    shares = [_share(model, weights)]
    if opened.twice and opened.beside is not None:
        shares.append(_share(opened.beside, opened.beside.weights))
    described = describe(model)
    if described is None or (described.source != "args" and state.args is not None and model.config is None):
        described = describe(state) or described
    rest = rest_of_state(state)
    kinds = (*fold(weights, hf=hf), *fold(opened.of_optimizer(), hf=False))
    warnings = [*state.warnings, *(opened.beside.warnings if opened.beside is not None else ()), *(described.warnings if described else ())]
    warnings += _iteration_warnings(state.location, rest.progress)
    if not weights:
        stored = {str(k) for k in state.common or {}} | {o.key.partition(".")[0] for o in state.objects.values()}
        stored |= {k.part for k in kinds}
        warnings.append(f"there are no model weights anywhere; what is stored: {', '.join(sorted(stored)) or 'nothing'}")
    return Inspection(
        state.location,
        state.format,
        shares[0],
        tuple(shares) if len(shares) > 1 else (),
        min(s.nbytes for s in shares) if len(shares) > 1 else 0,
        described,
        optimizer_state(state),
        rest,
        written_by(state, model),
        _extra_states(state),
        kinds,
        tuple(dict.fromkeys(warnings)),
        adapter_facts(state.location.directory, weights) if state.format == "peft" else None,
    )


def _extra_states(state: Checkpoint) -> int:
    tensors = state.details.tensors if isinstance(state.details, TorchDist) else {}
    return sum(o.key.endswith(EXTRA_STATE) for o in state.objects.values()) + sum(n.endswith(EXTRA_STATE) for n in tensors)


def _share(checkpoint: Checkpoint, weights: Mapping[str, TensorMetadata]) -> Share:
    totals: dict[str, list[int]] = {}
    for tensor in weights.values():
        total = totals.setdefault(tensor.dtype, [0, 0, 0])
        elements = tensor.numel
        total[0] += 1
        total[1] += elements
        total[2] += elements * DTYPES[tensor.dtype].bits // 8
    dtypes = sorted((DTypeTotal(n, *t) for n, t in totals.items()), key=lambda d: (-d.nbytes, d.dtype))
    count, elements, size = (sum(t[i] for t in totals.values()) for i in range(3))
    return Share(checkpoint.format, checkpoint.location.directory, count, elements, size, tuple(dtypes))


def _iteration_warnings(place: Location, progress: Mapping[str, Any]) -> list[str]:
    inside = progress.get("iteration")
    if place.iteration is not None and isinstance(inside, int) and inside != place.iteration:
        return [f"the folder says iteration {place.iteration}, the state inside it says {inside}"]
    return []


def arguments(opened: Opened) -> tuple[str, dict[str, Any]]:
    """("args" or "config.json", every stored argument by name); nested objects of a config are spelled with dots.

    CkptError E306 when neither is there.
    """
    if opened.state.args is not None:
        return "args", dict(opened.state.args)
    config = opened.model.config
    if config is None:
        raise CkptError("E306", "the checkpoint stores no arguments and there is no config.json", where=opened.state.location.directory)
    flat: dict[str, Any] = {}
    rest: list[tuple[str, Any]] = [("", config)]
    while rest:
        prefix, value = rest.pop()
        if isinstance(value, dict) and (value or not prefix):
            rest.extend((f"{prefix}.{k}" if prefix else k, v) for k, v in reversed(value.items()))
        else:
            flat[prefix] = value
    return "config.json", flat
