"""Two opened checkpoints under one naming, so that what means the same has the same name; nothing is converted.

With an HF folder on either side the names are Hugging Face's, between Megatron checkpoints canonical Megatron names. Other than a
conversion this refuses nothing: a tensor that is unknown to the family or has the wrong shape keeps the name it is stored under.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import CkptError
from ..families import family_named, family_of_config
from ..families.config import args_from_config, infer_family
from ..families.dimensions import Dimensions, dimensions
from ..families.family import Family, copies, expand, reason_to_leave_out
from ..families.megatron_args import effective_args
from ..hf_layouts import family_names
from ..inspection.overview import Opened
from ..model_names import EMBEDDING, HEAD, TABLES
from ..naming import canonical_tensors
from ..notes import Note
from ..tensors import TensorMetadata
from ..views import hf_tensors, stored_dimensions
from .reading import same_bits


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """One side. tensors: located, under the common naming; padding: rows of vocabulary tables that are no part of the model, by the
    name they were cut from; args: Megatron arguments of the model (None when nothing says them); config: config.json or None."""

    opened: Opened
    tensors: dict[str, TensorMetadata]
    args: dict[str, Any] | None
    config: dict[str, Any] | None
    family: Family | None
    dims: Dimensions | None
    notes: list[Note]
    padding: dict[str, TensorMetadata] = field(default_factory=dict)


def common_naming(a: Opened, b: Opened, family: str | None = None) -> tuple[str, Named, Named]:
    """("hf" or "mcore", A, B). Errors: E222 a side without weights, E306 nothing says the sizes of a model that must be taken apart."""
    for side in (a, b):
        if not side.model.weights:
            where = side.model.location.directory
            raise CkptError("E222", "there are no model weights to compare", where=where, hint="--optimizer compares optimizer state")
    if "hf" in (a.model.format, b.model.format):
        if a.model.format == b.model.format:
            return "hf", *_both_hf(_hf(a, family), _hf(b, family))
        if a.model.format == "hf":
            return "hf", *_hf_and_megatron(_hf(a, family), b, family)
        first, second = _hf_and_megatron(_hf(b, family), a, family)
        return "hf", second, first
    return "mcore", *_without_padding(_megatron(a, family), _megatron(b, family))


# ---- Hugging Face -------------------------------------------------------------------------------------------------------------------


def _hf(opened: Opened, family: str | None) -> Named:
    config = opened.model.config
    notes: list[Note] = []
    fam, args, dims = None, None, None
    try:
        if config is not None:
            fam = family_named(family) if family else family_of_config(config, opened.model.location.directory)
            args = effective_args(args_from_config(config, fam.rules, allow_unrepresentable=True)[0])
            args["padded_vocab_size"] = args.get("vocab_size")
            spelled = family_names(opened.model.tensors, fam, opened.model.location.directory)
            dims = stored_dimensions(args, fam, spelled, "hf", notes)
    except CkptError as error:
        notes.append(Note("assumed", opened.model.location.directory, f"names are taken as they are: {error.what}"))
        fam, args, dims = None, None, None
    return Named(opened, dict(opened.model.tensors), args, config, fam, dims, notes)


def _both_hf(a: Named, b: Named) -> tuple[Named, Named]:
    if a.tensors.keys() == b.tensors.keys():
        return a, b
    a, b = _spelled_alike(a), _spelled_alike(b)
    return _without_copies(a, b.tensors), _without_copies(b, a.tensors)


def _spelled_alike(side: Named) -> Named:
    if side.family is None:
        return side
    return replace(side, tensors=family_names(side.tensors, side.family, side.opened.model.location.directory))


def _without_copies(side: Named, other: Mapping[str, TensorMetadata]) -> Named:
    """The side without tensors that carry no weight of their own and that the other side lacks; a copy that differs stays."""
    if side.family is None or side.dims is None:
        return side
    tensors, notes = dict(side.tensors), list(side.notes)
    embedding = next((m.hf[0] for m in side.family.tensors if m.mcore == EMBEDDING), "")
    originals = dict(copies(side.family, side.dims))
    for name in [n for n in tensors if n not in other]:
        reason = reason_to_leave_out(side.family, side.dims, name, "hf")
        if reason is None:
            continue
        tied = any(m.when == "untied" and name in m.hf for m in side.family.tensors)
        original = embedding if tied else originals.get(name, "")
        if original in tensors and not same_bits(tensors[name], tensors[original]):
            notes.append(Note("warning", name, f"is another name of {original} in this model, and the two are not equal"))
            continue
        del tensors[name]
        why = f"it is another name of {original}, and equal to it" if original in side.tensors else reason
        notes.append(Note("dropped", name, f"not compared: {why}"))
    return replace(side, tensors=tensors, notes=notes)


# ---- Megatron -----------------------------------------------------------------------------------------------------------------------


def _megatron(opened: Opened, family: str | None) -> Named:
    checkpoint = opened.model
    tensors = canonical_tensors(checkpoint.locate_all(list(checkpoint.weights)), checkpoint.location.directory)
    args = None if checkpoint.args is None else effective_args(checkpoint.args)
    dims, fam = None, family_named(family) if family else None
    try:
        if args is not None:
            dims = dimensions({**args, "padded_vocab_size": _rows(tensors)})
            fam = fam or family_named(infer_family(args, tensors)[0])
    except CkptError:
        pass  # sizes and family only help to tell causes
    return Named(opened, tensors, args, None, fam, dims, _copies_that_differ(checkpoint))


def _rows(tensors: Mapping[str, TensorMetadata]) -> int | None:
    table = tensors.get(EMBEDDING) or tensors.get(HEAD)
    return table.global_shape[0] if table is not None and table.global_shape else None


def _copies_that_differ(checkpoint: Checkpoint) -> list[Note]:
    from ..formats.torch_legacy import Legacy
    from ..replicas import check_replicas

    if isinstance(checkpoint.details, Legacy):
        try:
            check_replicas(checkpoint.details)
        except CkptError as error:
            if error.code != "E225":
                raise
            return [Note("warning", checkpoint.location.directory, f"{error.what} ({error.found}); the first rank's copy is compared")]
    return []


def _hf_and_megatron(hf: Named, opened: Opened, family: str | None) -> tuple[Named, Named]:
    """(the HF side, the Megatron side under HF names)."""
    made = _megatron(opened, family)
    where = opened.model.location.directory
    stored = made.args if made.args is not None else hf.args
    if stored is None:
        raise CkptError(
            "E306",
            "neither side says the sizes of the model, so Megatron's tensors cannot be taken apart",
            where=where,
            hint="put the model's config.json beside the HF weights",
        )
    fam = family_named(family) if family else hf.family or family_named(infer_family(stored, made.tensors)[0])
    hf = _spelled_alike(replace(hf, family=fam))
    args, notes = dict(stored), made.notes
    args["padded_vocab_size"] = rows = _rows(made.tensors) or args.get("padded_vocab_size")
    table = next((hf.tensors[m.hf[0]] for m in fam.tensors if m.mcore == EMBEDDING and m.hf[0] in hf.tensors), None)
    # Where Megatron's table has at least the rows of the HF one, these are the model: what follows pads it for the parallel layout.
    if table is not None and table.global_shape and table.global_shape[0] <= (rows or 0):
        args["vocab_size"] = table.global_shape[0]
    elif not args.get("vocab_size"):
        args["vocab_size"] = (hf.args or {}).get("vocab_size") or rows
    if not args.get("mtp_num_layers"):
        args["mtp_num_layers"] = (hf.args or {}).get("mtp_num_layers")
    dims = stored_dimensions(args, fam, made.tensors, "mcore", notes)
    tensors: dict[str, TensorMetadata] = {}
    used = set()
    for binding in expand(fam, dims):
        tensor = made.tensors.get(binding.mcore)
        if tensor is None:
            continue
        shape = binding.mapping.mcore_shape(dims)
        if tensor.global_shape == shape:
            tensors.update(hf_tensors(binding, dims, tensor))
            used.add(binding.mcore)
        else:
            said = f"has the shape {list(tensor.global_shape)}, the sizes of the model give it {list(shape)}: it keeps its Megatron name"
            notes.append(Note("warning", binding.mcore, said))
    for name, tensor in made.tensors.items():
        if name in used:
            continue
        reason = reason_to_leave_out(fam, dims, name, "mcore")
        if reason is None:
            tensors[name] = tensor
        else:
            notes.append(Note("dropped", name, f"not compared: {reason}"))
    if rows and dims.symbols["V"] < rows:
        notes.append(Note("cut", "vocabulary", f"{rows - dims.symbols['V']} padding rows after {dims.symbols['V']} are not compared"))
    shown = made.args if made.args is None else {**made.args, **{n: args[n] for n in ("vocab_size", "mtp_num_layers")}}
    side = replace(made, tensors=tensors, args=shown, family=fam, dims=dims, notes=notes)
    return _without_copies(hf, tensors), side


def _without_padding(a: Named, b: Named) -> tuple[Named, Named]:
    """Vocabulary tables cut to the rows that are the model, wherever one of the sides says how many that is."""
    told = [int(s.args["vocab_size"]) for s in (a, b) if s.args and isinstance(s.args.get("vocab_size"), int) and s.args["vocab_size"] > 0]
    rows = [r for r in (_rows(a.tensors), _rows(b.tensors)) if r]
    if not told or min(told) > min(rows, default=0):
        return a, b
    return _cut(a, min(told)), _cut(b, min(told))


def _cut(side: Named, vocab: int) -> Named:
    tensors, padding = dict(side.tensors), {}
    for name, tensor in side.tensors.items():
        if not name.endswith(TABLES) or not tensor.global_shape or tensor.global_shape[0] <= vocab:
            continue
        rest, rows = tensor.global_shape[1:], tensor.global_shape[0]
        zeros = (0,) * len(rest)
        kept = tensor.region((0, *zeros), (vocab, *rest))
        tensors[name] = TensorMetadata(name, tensor.dtype, (vocab, *rest), tuple(kept))
        cut = tensor.region((vocab, *zeros), (rows - vocab, *rest))
        below = tuple(c.moved((c.global_offset[0] - vocab, *c.global_offset[1:])) for c in cut)
        padding[name] = TensorMetadata(name, tensor.dtype, (rows - vocab, *rest), below)
    return replace(side, tensors=tensors, padding=padding)
