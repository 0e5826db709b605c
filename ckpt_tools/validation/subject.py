"""What is validated: one checkpoint, looked at piece by piece, so that one broken file does not hide the next.

Everything is computed once, when the first check asks for it. A CkptError on the way is kept and not raised: checks turn it into findings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..checkpoint import HF_FOLDER, Checkpoint, is_optimizer, open_location
from ..diff.sides import common_naming
from ..errors import CkptError
from ..formats.hf import INDEX_NAME, open_hf, read_json
from ..formats.safetensors import Header, read_header
from ..formats.torch_dist import Locator, TorchDist, read_object
from ..formats.torch_legacy import FILE_NAME, Legacy
from ..formats.torch_zip import open_torch_file
from ..inspection.overview import Opened
from ..location import Location, locate
from ..optimizer.reading import OptimizerState, read_optimizer
from ..statistics import Statistics, statistics_of
from ..tensors import TensorMetadata, check_tiling
from ..tracker import list_folder
from ..views import View, as_mcore
from .json_files import Index, twice_in_json
from .model import Model, model_of_hf, model_of_megatron

UNUSABLE = ("E105", "E106", "E107", "E901")  # there is nothing to validate


class Subject:
    """A checkpoint under validation. Attributes are computed on first use and None (or empty) where something before them failed."""

    def __init__(
        self,
        given: str,
        iteration: str | int = "latest",
        *,
        deep: bool = False,
        resume: bool = False,
        threads: int = 2,
        family: str | None = None,
    ) -> None:
        self.given, self.iteration, self.deep, self.resume = given, iteration, deep, resume
        self.threads, self.family = threads, family
        self.errors: list[CkptError] = []
        self.on_progress: Callable[[int], None] = lambda _: None  # gets the bytes read since its last call, from any thread
        self._statistics: dict[str, dict[str, Statistics]] = {}

    def keep(self, error: CkptError) -> None:
        """Note an error for the checks that look for its code."""
        if not any((e.code, e.what, e.where) == (error.code, error.what, error.where) for e in self.errors):
            self.errors.append(error)

    # ---- where it is ------------------------------------------------------------------------------------------------------------

    @cached_property
    def location(self) -> Location | None:
        """The one checkpoint that is validated. CkptError is raised when there is none at all (E105, E106, E107, E901)."""
        try:
            return locate(self.given, self.iteration, need_complete=False, allow_untracked=True)
        except CkptError as error:
            if error.code in UNUSABLE:
                raise
            self.keep(error)
            return None

    @property
    def root(self) -> str | None:
        """The folder of the tracker; None for an HF folder or a single file."""
        if self.location is not None:
            return self.location.root
        return self.given if os.path.isdir(self.given) else os.path.dirname(self.given) or "."

    @property
    def directory(self) -> str:
        """The folder (or file) that is validated."""
        return self.location.directory if self.location is not None else self.given

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in the directory; empty for a single file."""
        return tuple(list_folder(self.directory)) if os.path.isdir(self.directory) else ()

    # ---- safetensors ------------------------------------------------------------------------------------------------------------

    @cached_property
    def hf_directory(self) -> str | None:
        """The folder or file with safetensors weights: the directory itself, or what lies beside an iteration folder."""
        if self.location is None:
            return None
        return self.location.directory if self.location.format == "hf" else self.location.weights

    @cached_property
    def shards(self) -> dict[str, str]:
        """Name -> path of every safetensors file of the model (or adapter), those that the index names in subfolders included."""
        place = self.hf_directory
        if self.location is not None and self.location.format == "peft":
            place = self.location.directory
            if os.path.isdir(place):
                return {n: os.path.join(place, n) for n in self.names if n.startswith("adapter_model") and n.endswith(".safetensors")}
        if place is None:
            return {}
        if os.path.isfile(place):
            return {os.path.basename(place): place}
        found = {n: os.path.join(place, n) for n in list_folder(place) if n.endswith(".safetensors")}
        found = {n: p for n, p in found.items() if not n.startswith(("adapter_model", "optimizer"))}
        if self.index is not None:
            from ..formats.hf import is_safe_name

            for name in self.index.weight_map.values():
                path = os.path.join(place, name) if is_safe_name(name) else ""
                if path and os.path.isfile(path):
                    found.setdefault(name, path)
        return found

    @cached_property
    def headers(self) -> dict[str, Header]:
        """Headers of the files that have a valid one."""
        found = {}
        for name, path in self.shards.items():
            try:
                found[name] = read_header(path)
            except CkptError as error:
                self.keep(error)
        return found

    @cached_property
    def index(self) -> Index | None:
        """The safetensors index, when there is one that can be read."""
        place = self.hf_directory
        if place is None or os.path.isfile(place):
            return None
        listed = [n for n in list_folder(place) if n.endswith(".safetensors.index.json")]
        name = INDEX_NAME if INDEX_NAME in listed else listed[0] if listed else None
        if name is None:
            return None
        path = os.path.join(place, name)
        try:
            value = read_json(path)
        except CkptError as error:
            self.keep(error)
            return None
        table = value.get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            self.keep(CkptError("E216", "the index has no weight_map of names to files", where=path))
            return None
        return Index(path, value, table, twice_in_json(path))

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """config.json of the HF weights."""
        place = self.hf_directory
        if place is None:
            return None
        path = os.path.join(place if os.path.isdir(place) else os.path.dirname(place), "config.json")
        try:
            return read_json(path) if os.path.exists(path) else None
        except CkptError as error:
            self.keep(error)
            return None

    @cached_property
    def kept_config(self) -> dict[str, Any] | None:
        """config.json of the HF model that the weights came from, kept in the iteration folder, or that lies at the root."""
        for folder in (os.path.join(self.directory, HF_FOLDER), self.root or ""):
            path = os.path.join(folder, "config.json")
            if folder and os.path.isfile(path):
                try:
                    return read_json(path)
                except CkptError as error:
                    self.keep(error)
        return None

    @cached_property
    def hf(self) -> Checkpoint | None:
        """The safetensors weights as a checkpoint; opened from the headers when the index is wrong."""
        place = self.hf_directory
        if place is None or self.location is None:
            return None
        location = replace(self.location, directory=place, format="hf", weights=None)
        try:
            folder = open_hf(place, tolerant=True)
            return Checkpoint(location, "hf", folder.tensors, folder.config, details=folder)
        except CkptError as error:
            if error.code not in ("E213", "E210", "E211", "E216"):
                self.keep(error)
        tensors = {n: t for header in self.headers.values() for n, t in header.tensors.items()}
        return Checkpoint(location, "hf", tensors, self.config) if tensors else None

    # ---- Megatron ---------------------------------------------------------------------------------------------------------------

    @cached_property
    def state(self) -> Checkpoint | None:
        """The iteration folder (torch_dist, legacy, common.pt) as an opened checkpoint."""
        place = self.location
        if place is None or place.format in ("hf", "peft"):
            return None
        if os.path.isfile(place.directory) and place.format == "torch":
            self.keep(CkptError("E223", "one rank's file by itself is no checkpoint: point at the iteration folder", where=place.directory))
            return None
        if place.format == "torch" and not self._rank_files_open:
            return None
        if place.format == "torch_dist" and ".metadata" not in self.names:
            return None  # the save did not end; another check tells what is missing
        try:
            return open_location(place)
        except CkptError as error:
            self.keep(error)
        except OSError as error:
            self.keep(
                CkptError("E217", "a file of the checkpoint cannot be read", where=place.directory, found=error.strerror or str(error))
            )
        return None

    @cached_property
    def _rank_files_open(self) -> bool:
        """Whether every rank file of a legacy folder can be read by itself."""
        good = True
        folders = [n for n in self.names if n.startswith("mp_rank_")]
        for folder in folders:
            for name in list_folder(os.path.join(self.directory, folder)):
                if not name.endswith(".pt"):
                    continue
                try:
                    open_torch_file(os.path.join(self.directory, folder, name))
                except CkptError as error:
                    self.keep(error)
                    good = good and name != FILE_NAME
        return good

    @cached_property
    def located(self) -> dict[str, TensorMetadata]:
        """Stored tensors of a torch_dist folder whose pieces fit together and whose records are what the index says."""
        details = self.state.details if self.state is not None else None
        if not isinstance(details, TorchDist):
            return {} if self.state is None else dict(self.state.tensors)
        found = {}
        with Locator(details.tensors) as locator:
            for name, tensor in details.tensors.items():
                try:
                    check_tiling(tensor, details.directory)
                    found[name] = locator.tensor(tensor)
                except CkptError as error:
                    self.keep(error)
        return found

    @cached_property
    def objects_read(self) -> int:
        """How many pickled objects could be read, each as inert data."""
        if self.state is None:
            return 0
        count = 0
        for stored in self.state.objects.values():
            try:
                read_object(stored)
                count += 1
            except CkptError as error:
                error.where = f"{stored.extent.path}: {stored.fqn}"
                self.keep(error)
        return count

    # ---- what it means ----------------------------------------------------------------------------------------------------------

    @property
    def legacy(self) -> Legacy | None:
        """Details of a legacy folder."""
        details = self.state.details if self.state is not None else None
        return details if isinstance(details, Legacy) else None

    @property
    def weights_in_state(self) -> dict[str, TensorMetadata]:
        """Located weights stored in Megatron's format."""
        if self.state is None:
            return {}
        kept = self.state.weights
        return {n: t for n, t in self.located.items() if n in kept}

    @cached_property
    def models(self) -> tuple[Model, ...]:
        """The model as HF folder and as Megatron checkpoint, whichever are there."""
        made = []
        if self.hf is not None and self.hf.tensors:
            made.append(model_of_hf(self.hf, self.family))
        if self.state is not None and self.weights_in_state:
            made.append(model_of_megatron(self.state, self.weights_in_state, self.family, self.kept_config))
        for model in made:
            for error in model.errors:
                self.keep(error)
        return tuple(made)

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """Megatron's common state; empty when there is none."""
        return (self.state.common if self.state is not None else None) or {}

    # ---- what is in it ----------------------------------------------------------------------------------------------------------

    @cached_property
    def optimizer_view(self) -> View | None:
        """The model under canonical names, with the vocabulary padded as the optimizer state has it; None when it does not fit."""
        if self.state is None or self.state.format not in ("torch_dist", "torch"):
            return None
        try:
            if self.weights_in_state:
                return as_mcore(self.state, family=self.family)
            if self.hf is not None and self.hf.tensors:
                rows = (self.state.args or {}).get("padded_vocab_size")
                return as_mcore(self.hf, family=self.family, padded_vocab=rows if isinstance(rows, int) else None)
        except CkptError:
            pass  # what does not fit is told by the checks of names and shapes
        return None

    @cached_property
    def optimizer(self) -> OptimizerState | None:
        """The optimizer state as tensors of the model; None when there is none or no model to hold it against."""
        if self.state is None or self.optimizer_view is None:
            return None
        if self.legacy is not None and not self.weights_in_state:
            return None  # its tensors are numbered in the order of the model's, which is not in the files
        try:
            state = read_optimizer(self.state, self.optimizer_view)
        except CkptError as error:
            self.keep(error)
            return None
        return None if state.kind == "none" else state

    @cached_property
    def copies(self) -> tuple[dict[str, TensorMetadata], dict[str, TensorMetadata]] | None:
        """(safetensors weights, Megatron's) under one naming when they are stored twice, else None."""
        if self.hf is None or self.state is None or not self.hf.tensors or not self.weights_in_state:
            return None
        try:
            _, first, second = common_naming(Opened(self.hf, None), Opened(self.state, None), self.family)
        except CkptError as error:
            self.keep(error)
            return None
        return first.tensors, second.tensors

    def statistics(self, model: Model) -> dict[str, Statistics]:
        """Figures of every weight; read once."""
        if model.side not in self._statistics:
            self._statistics[model.side] = self._read(model.tensors)
        return self._statistics[model.side]

    @cached_property
    def state_statistics(self) -> dict[str, Statistics]:
        """Figures of optimizer state: by parameter where it could be read so, else as stored."""
        if self.optimizer is not None:
            named = {f"{s}/{n}": t for s, tensors in self.optimizer.tensors.items() for n, t in tensors.items()}
        else:
            named = {n: t for n, t in self.located.items() if is_optimizer(n)}
        return self._read(named)

    def _read(self, tensors: Mapping[str, TensorMetadata]) -> dict[str, Statistics]:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(max(1, self.threads)) as pool:
            return dict(zip(tensors, pool.map(lambda t: statistics_of(t, self.on_progress), tensors.values()), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors whose values --deep looks at."""
        state = self.optimizer.nbytes if self.optimizer is not None else sum(t.nbytes for n, t in self.located.items() if is_optimizer(n))
        return sum(t.nbytes for model in self.models for t in model.tensors.values()) + state

    def look_everywhere(self) -> None:
        """Compute whatever may meet an error, so that `errors` is complete."""
        for name in ("location", "index", "headers", "config", "hf", "state", "located", "objects_read", "models", "optimizer"):
            getattr(self, name)
