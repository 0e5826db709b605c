"""An opened checkpoint: its index, its state, and tensors that are read when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .dtypes import dtype
from .errors import CkptError, nearest
from .formats import hf as hf_format
from .formats import run_config
from .formats import torch_dist as torch_dist_format
from .location import Location, locate
from .tensors import TensorMetadata, check_tiling

if TYPE_CHECKING:
    from .formats.torch_legacy import Legacy
    from .lazy import LazyTensor

HF_FOLDER = "hf"  # inside an iteration folder: config, tokenizer and other files of the HF model, as Megatron-Bridge keeps them
EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint(Mapping[str, "LazyTensor"]):
    """A checkpoint as a mapping of stored names to lazily read tensors; opening read headers only.

    location  what was opened and why;   format   "hf", "torch_dist", ...
    tensors   stored name -> TensorMetadata (weights and optimizer state alike; helper entries `_extra_state` are not tensors)
    config    config.json beside HF weights, or None;   common  Megatron's common state (args, iteration, ...), or None
    objects   stored objects (rng_state, _extra_state, ...) by name;   folder  where side files lie;   warnings  things worth telling
    """

    location: Location
    format: str
    tensors: dict[str, TensorMetadata]
    config: dict[str, Any] | None = None
    common: dict[str, Any] | None = None
    objects: dict[str, torch_dist_format.StoredObject] = field(default_factory=dict)
    details: hf_format.HfFolder | torch_dist_format.TorchDist | Legacy | None = None
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> LazyTensor:
        from .lazy import LazyTensor

        if name not in self.tensors:
            near = nearest(name, self.tensors)
            raise KeyError(f"{name!r} is not in {self.location.directory}" + (f"; nearest: {', '.join(near)}" if near else ""))
        return LazyTensor(self.located(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Checkpoint({self.location.directory!r}, format={self.format!r}, {len(self.tensors)} tensors)"

    def located(self, name: str) -> TensorMetadata:
        """Metadata of one tensor with its bytes located (reads the headers of its records)."""
        return self.locate_all([name])[name]

    def locate_all(self, names: list[str] | None = None) -> dict[str, TensorMetadata]:
        """The same for many (default: all) tensors, each checked to be covered by its chunks exactly once."""
        wanted = list(self.tensors) if names is None else names
        result = {}
        with torch_dist_format.Locator(self.tensors) as locator:
            for name in wanted:
                tensor = self.tensors[name]
                check_tiling(tensor, self.location.directory)
                result[name] = locator.tensor(tensor)
        return result

    @property
    def args(self) -> dict[str, Any] | None:
        """Megatron's arguments stored in the checkpoint, or None."""
        args = (self.common or {}).get("args")
        return args if isinstance(args, dict) else None

    @property
    def weights(self) -> dict[str, TensorMetadata]:
        """The tensors that are model weights (not optimizer state)."""
        return {n: t for n, t in self.tensors.items() if not is_optimizer(n)}

    @property
    def folder(self) -> str:
        """The folder that side files (config, tokenizer) are looked for in."""
        path = self.location.directory
        return path if os.path.isdir(path) else os.path.dirname(path)


def is_optimizer(name: str) -> bool:
    """Whether a stored torch_dist key belongs to the optimizer."""
    return name.startswith(("optimizer.", "chained_")) or ".optimizer." in name.split("decoder", 1)[0]


def open_checkpoint(path: str | os.PathLike[str], iteration: str | int = "latest", *, allow_untracked: bool = False) -> Checkpoint:
    """Open a checkpoint of any format ckpt reads; only headers and indexes are read.

    path       a run folder, one iter_XXXXXXX folder, an HF folder or one .safetensors file.
    iteration  "latest" (what the tracker file says), a number, or "release".
    allow_untracked  without a tracker, take the newest complete iteration instead of refusing.

    Errors: CkptError E1xx when the iteration cannot be chosen, E2xx when a file is broken, E5xx when a pickle names foreign code.
    """
    return open_location(locate(os.fspath(path), iteration, allow_untracked=allow_untracked))


def open_location(location: Location) -> Checkpoint:
    """Open what `locate` found."""
    if location.format == "hf":
        folder = hf_format.open_hf(location.directory)
        return Checkpoint(location, "hf", folder.tensors, folder.config, details=folder, warnings=(*location.warnings, *folder.warnings))
    if location.format in ("torch_dist", "torch_dcp"):
        opened = torch_dist_format.open_torch_dist(location.directory)
        common, told = _with_arguments(opened.common, location.directory)
        tensors = {n: t for n, t in opened.tensors.items() if not n.endswith(EXTRA_STATE)}
        return Checkpoint(
            location, location.format, tensors, None, common, opened.objects, opened, (*location.warnings, *opened.warnings, *told)
        )
    if location.format == "torch":
        from .formats.torch_legacy import open_legacy

        legacy = open_legacy(location.directory)
        return Checkpoint(location, "torch", legacy.tensors, None, legacy.common, details=legacy, warnings=location.warnings)
    if location.format == "state":
        file, _ = torch_dist_format.open_common(location.directory, {})
        common = None if file is None else torch_dist_format.common_value(file)
        return Checkpoint(location, "state", {}, None, common, warnings=location.warnings)
    if location.format == "peft" and os.path.isdir(location.directory):
        from .adapters.peft import read_adapter

        _, tensors = read_adapter(location.directory)
        return Checkpoint(location, "peft", tensors, warnings=location.warnings)
    raise CkptError("E221", f"ckpt cannot read the format {location.format!r} yet", where=location.directory, expected="hf, torch_dist")


def _with_arguments(common: dict[str, Any] | None, directory: str) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The common state with the arguments that Megatron-Bridge keeps in a file of its own, where it stores none; what to say about it."""
    if common is not None and isinstance(common.get("args"), dict):
        return common, ()
    args = run_config.read_arguments(directory)
    if args is None:
        return common, ()
    counted = {"iteration": args["iteration"]} if "iteration" in args else {}
    said = f"the model's arguments were read from {run_config.NAME}: Megatron-Bridge stores no others"
    return {**counted, **(common or {}), "args": args}, (said,)


def kept_hf_folder(checkpoint: Checkpoint) -> str | None:
    """The folder with the config.json of the HF model that a Megatron checkpoint came from: inside the iteration, or the run's root."""
    places = (os.path.join(checkpoint.location.directory, HF_FOLDER), checkpoint.location.root or "")
    return next((p for p in places if p and os.path.isfile(os.path.join(p, "config.json"))), None)


def byte_count(tensors: Mapping[str, TensorMetadata]) -> int:
    """Bytes of all tensors in their stored dtypes."""
    return sum(t.numel * dtype(t.dtype).bits // 8 for t in tensors.values())
