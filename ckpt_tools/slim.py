"""Weights that are stored twice: take Megatron's copy out of an iteration folder once it is proved equal to the safetensors beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .checkpoint import EXTRA_STATE, Checkpoint, byte_count, is_optimizer, open_location
from .errors import CkptError
from .execution import Progress, Result, execute
from .formats import dcp_metadata, pickle_writer
from .formats.torch_dist import TorchDist, open_torch_dist
from .notes import Note
from .planning import Copied, Move, Plan, SourceFile, TargetFile
from .source_files import opened
from .split import places_looked_at
from .tensors import Chunk, Extent, Shape, TensorMetadata
from .verify import compare
from .views import View, as_hf

ALIGN = 64
_INTEGRITY = "integrity.json"  # sha256 sums of the old files


@dataclass(frozen=True, slots=True)
class _Record:
    """A stored record that stays: its key, the offset of its piece (None for an object), where it lies."""

    fqn: str
    offset: Shape | None
    extent: Extent


def plan_slim(checkpoint: Checkpoint, *, buffer: int, threads: int) -> Plan:
    """The plan that writes the iteration folder anew without model weights, every other record byte for byte.

    All weights are compared first. Errors: CkptError E540 there is no second copy, E413 the copies differ, E541 the safetensors do not
    hold everything, E542 an index that would lose something.
    """
    details, weights = _opened(checkpoint)
    model = _compared(checkpoint, weights, buffer, threads)
    files: dict[str, list[_Record]] = {}
    for record in _kept(checkpoint, details):
        files.setdefault(record.extent.path, []).append(record)
    targets: list[TargetFile] = []
    moves: list[Move] = []
    stored: list[tuple[str, Shape | None, str, int, int]] = []
    for number, (path, records) in enumerate(files.items()):
        position = 0
        name = os.path.relpath(path, details.directory)
        for record in sorted(records, key=lambda r: r.extent.offset):
            start, length = -(-position // ALIGN) * ALIGN, record.extent.length
            stored.append((record.fqn, record.offset, name, start, length))
            moves.append(Move(number, record.extent.offset, number, start, (length,), (1,), (1,), "uint8", "uint8"))
            position = start + length
        targets.append(TargetFile(name, position))
    tensors = [t for n, t in details.tensors.items() if n not in checkpoint.weights]
    index = dcp_metadata.metadata_object(
        ((t.fqn, t.dtype, t.global_shape, [(c.global_offset, c.local_shape) for c in t.chunks]) for t in tensors),
        details.objects,
        stored,
    )
    data = pickle_writer.dump(index)
    targets.append(TargetFile(".metadata", len(data), ((0, data),)))
    copies, notes = _others(details, {t.path for t in targets})
    removed = byte_count(checkpoint.weights)
    notes += [
        Note("dropped", "weights", f"{len(checkpoint.weights)} tensors ({removed} bytes) that {weights.location.directory} holds too"),
        *(Note("dropped", n.subject, n.text) for n in model if n.kind in ("cut", "dropped")),
    ]
    location = checkpoint.location
    return Plan(
        {"path": location.directory, "format": checkpoint.format, "iteration": location.label, "chosen": location.chosen},
        {"format": "split", "iteration": location.label, "weights": weights.location.directory, "bytes_removed": removed},
        tuple(_source(path) for path in files),
        tuple(targets),
        copies,
        tuple(moves),
        tuple(notes),
        len(tensors),
        buffer,
    )


def slim(
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    threads: int = 2,
    fsync: bool = True,
    on_progress: Progress | None = None,
) -> Result:
    """Carry out a plan of `plan_slim`. The new folder is written beside the old one, read back and compared record by record, and takes
    its place in one step; the old one is deleted after that. Errors: as execution.execute."""
    details, _ = _opened(checkpoint)
    directory = checkpoint.location.directory

    def check(folder: str) -> int:
        expected = {_name(r): _bytes(r) for r in _kept(checkpoint, details)}
        made = open_torch_dist(folder)
        found = {_name(r): _bytes(r) for r in _records(made)}
        if found.keys() != expected.keys():
            raise CkptError("E412", "the new iteration folder does not hold the records it should", where=folder)
        return compare(expected, found, buffer=plan.buffer, threads=threads)

    return execute(
        plan, directory, threads=threads, fsync=fsync, overwrite=True, on_progress=on_progress, before_commit=check, in_place=True
    )


def _opened(checkpoint: Checkpoint) -> tuple[TorchDist, Checkpoint]:
    location, details = checkpoint.location, checkpoint.details
    if not isinstance(details, TorchDist) or checkpoint.format != "torch_dist":
        raise CkptError(
            "E540",
            f"there is nothing to take out of a checkpoint of format {checkpoint.format!r}",
            where=location.directory,
            expected="a torch_dist iteration folder whose weights lie beside it as safetensors too",
        )
    if location.weights is None:
        raise CkptError(
            "E540",
            "the weights are stored once only: no safetensors lie beside this iteration",
            where=location.directory,
            found=f"none in {places_looked_at(checkpoint)}",
            hint="`ckpt convert RUN DST --to split` makes a run that stores them as safetensors",
        )
    if not checkpoint.weights:
        raise CkptError("E540", "the weights are stored once already", where=location.directory, found=f"safetensors in {location.weights}")
    if details.original_shapes:
        raise CkptError(
            "E542",
            "this optimizer state needs an index that ckpt cannot write",
            where=location.directory,
            found="fully_sharded_model_space of megatron-core 0.8 to 0.15",
            hint="`ckpt convert RUN DST --to split` writes it in a form that newer versions read too",
        )
    return details, open_location(replace(location, directory=location.weights, format="hf", weights=None))


def _compared(checkpoint: Checkpoint, weights: Checkpoint, buffer: int, threads: int) -> tuple[Note, ...]:
    """What the two copies are said to differ in beyond values; raises unless every weight is in the safetensors, equal and of one dtype."""
    location = checkpoint.location
    view = as_hf(checkpoint, hf_config=weights.config, repeated=weights.tensors)
    lacking = sorted(view.tensors.keys() - weights.tensors.keys())
    cast = [n for n, t in view.tensors.items() if n in weights.tensors and weights.tensors[n].dtype != t.dtype]
    if lacking or cast:
        first = (lacking or cast)[0]
        other = "nothing" if lacking else weights.tensors[first].dtype
        raise CkptError(
            "E541",
            f"the safetensors do not hold all of Megatron's copy: {len(lacking)} tensors are missing, {len(cast)} have another dtype",
            where=f"{location.weights}: {first}",
            expected=view.tensors[first].dtype,
            found=other,
        )
    try:
        compare(weights.tensors, view.tensors, buffer=buffer, threads=threads)
    except CkptError as error:
        raise CkptError(
            "E413",
            "the weights are stored twice and the copies differ: nothing was changed",
            where=f"{location.weights}: {_first_different(weights, view, buffer)}",
            found=f"{error.what}: {error.where}, {error.found}",
            hint=f"`ckpt diff {location.weights} {location.directory}` shows what differs",
        ) from None
    rows, vocab = view.dims.padded_vocab, view.dims.symbols["V"]
    padding = (Note("cut", "vocabulary", f"{rows - vocab} padding rows after {vocab} are no part of the model"),) if rows > vocab else ()
    return (*padding, *view.notes)


def _first_different(weights: Checkpoint, view: View, buffer: int) -> str:
    for name, tensor in weights.tensors.items():
        try:
            compare({name: tensor}, view.tensors, buffer=buffer, threads=1)
        except CkptError:
            return name
    return "a file that changed meanwhile"


def _kept(checkpoint: Checkpoint, details: TorchDist) -> Iterator[_Record]:
    return (r for r in _records(details) if r.offset is None or is_optimizer(r.fqn) or r.fqn.endswith(EXTRA_STATE))


def _records(details: TorchDist) -> Iterator[_Record]:
    for tensor in details.tensors.values():
        for chunk in tensor.chunks:
            if chunk.extent is not None:
                yield _Record(tensor.fqn, chunk.global_offset, chunk.extent)
    for stored in details.objects.values():
        yield _Record(stored.fqn, None, stored.extent)


def _name(record: _Record) -> str:
    return json.dumps([record.fqn, record.offset])


def _bytes(record: _Record) -> TensorMetadata:
    extent = replace(record.extent, strides=(1,))
    return TensorMetadata(record.fqn, "uint8", (extent.length,), (Chunk((0,), (extent.length,), extent),))


def _source(path: str) -> SourceFile:
    stat = os.stat(path)
    return SourceFile(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


def _others(details: TorchDist, made: set[str]) -> tuple[tuple[Copied, ...], list[Note]]:
    """The other files of the folder: copied, but for data files without records and checksums of files that are no more."""
    copies, notes = [], []
    data = {os.path.relpath(p, details.directory) for p in details.files}
    for folder, _, names in os.walk(details.directory):
        for name in sorted(names):
            full = os.path.join(folder, name)
            relative = os.path.relpath(full, details.directory)
            if relative in made or relative in data:
                continue
            if relative == _INTEGRITY:
                notes.append(Note("dropped", relative, "its checksums are those of the old files"))
                continue
            with opened(full) as file:
                copies.append(Copied(full, relative, os.fstat(file.fileno()).st_size))
    return tuple(copies), notes
