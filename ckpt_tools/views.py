"""A checkpoint under the other naming: HF names for a Megatron checkpoint and the other way round, without moving a byte.

A view is an index whose chunks point into the source's files. Converting is writing a view down; feeding a torch_dist folder to an
inference engine is reading one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, kept_hf_folder
from .errors import CkptError
from .families import family_named, family_of_config
from .families.config import args_from_config, config_from_args, infer_family, unread_fields
from .families.dimensions import Dimensions, dimensions
from .families.family import Binding, Bound, Family, bind, copies, expand
from .families.mappings import Kept
from .formats.hf import read_json
from .hf_layouts import family_names, fuse
from .model_names import EMBEDDING
from .naming import canonical_tensors
from .notes import Note
from .quantised import dequantised, without_quantisation
from .tensors import Chunk, Shape, TensorMetadata, intersect

if TYPE_CHECKING:
    from .lazy import LazyTensor


@dataclass(frozen=True, slots=True, eq=False)
class View(Mapping[str, "LazyTensor"]):
    """Tensors under another naming. tensors: name -> TensorMetadata pointing into the source; args: Megatron arguments of the model;
    dims: its sizes; order: names in the target's own order; notes: what a person must know."""

    source: Checkpoint
    naming: str
    family: Family | None
    args: dict[str, Any]
    dims: Dimensions
    config: dict[str, Any] | None
    tensors: dict[str, TensorMetadata]
    keep_dtype: frozenset[str]
    notes: tuple[Note, ...]

    def __getitem__(self, name: str) -> LazyTensor:
        from .lazy import LazyTensor

        return LazyTensor(self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def as_mcore(
    checkpoint: Checkpoint, *, family: str | None = None, padded_vocab: int | None = None, allow_unrepresentable: bool = False
) -> View:
    """The checkpoint under canonical Megatron names (global layer and expert numbers, Transformer Engine spelling, whole tensors).

    padded_vocab  rows of the embedding (zero rows are added); default: that of a Megatron source, for HF no padding.
    Errors: E301 sizes contradict the tensors, E303/E304 missing or unexpected tensors, E310 unknown family.
    """
    if checkpoint.format == "hf":
        return _mcore_from_hf(checkpoint, family, padded_vocab, allow_unrepresentable)
    try:
        model = megatron_model(checkpoint, family, None)
    except CkptError as error:
        if error.code not in ("E310", "E304") or family is not None:
            raise
        return _mcore_of_unknown_family(checkpoint)
    for binding in model.bound.bindings:
        _check_shapes(binding, model.dims, "mcore", model.tensors, checkpoint.location.directory)
    names = [b.mcore for b in model.bound.bindings]
    notes = tuple(n for n in model.notes if n.kind != "config")  # config.json is not written here
    return View(
        checkpoint,
        "mcore",
        model.family,
        model.args,
        model.dims,
        None,
        {n: model.tensors[n] for n in names},
        _kept(model.bound, "mcore"),
        notes,
    )


def as_hf(
    checkpoint: Checkpoint,
    *,
    family: str | None = None,
    hf_config: Mapping[str, Any] | None = None,
    repeated: Collection[str] | None = None,
) -> View:
    """The checkpoint under Hugging Face names, vocabulary padding cut off.

    repeated   which of the names under which the family's files repeat a tensor there shall be; default: all of them.
    hf_config  a config.json to follow; without it the checkpoint's own arguments decide, and `notes` say what was assumed.
    Errors: as as_mcore; E302 when config and checkpoint disagree about a size.
    """
    if checkpoint.format == "hf":
        fam = family_named(family) if family else family_of_config(_config_of(checkpoint), checkpoint.location.directory)
        args, _ = args_from_config(_config_of(checkpoint), fam.rules, allow_unrepresentable=True)
        return View(checkpoint, "hf", fam, args, dimensions(args), checkpoint.config, dict(checkpoint.tensors), frozenset(), ())
    model = megatron_model(checkpoint, family, hf_config)
    dims, bound, where = model.dims, model.bound, checkpoint.location.directory
    tensors: dict[str, TensorMetadata] = {}
    for binding in bound.bindings:
        _check_shapes(binding, dims, "mcore", model.tensors, where)
        tensors.update(hf_tensors(binding, dims, model.tensors[binding.mcore]))
    again = [(copy, original) for copy, original in copies(model.family, dims) if repeated is None or copy in repeated]
    tensors.update((copy, replace(tensors[original], fqn=copy)) for copy, original in again)
    names = [*(n for b in bound.bindings for n in b.hf), *(copy for copy, _ in again)]
    named = fuse({n: tensors[n] for n in names}, model.family, only=True)
    ordered = {n: named[n] for n in hf_order(named)}
    return View(checkpoint, "hf", model.family, model.args, dims, model.config, ordered, _kept(bound, "hf"), model.notes)


def _mcore_of_unknown_family(checkpoint: Checkpoint) -> View:
    """Megatron's own tensors of a model that no family describes whole: they can be moved between layouts all the same."""
    where = checkpoint.location.directory
    tensors = canonical_tensors(checkpoint.locate_all(list(checkpoint.weights)), where)
    args = dict(checkpoint.args or {})
    args["padded_vocab_size"] = _rows(tensors, args)
    notes: list[Note] = []
    _true_vocab(args, notes, where)
    notes.append(Note("assumed", "", "no family that ckpt knows has these tensors: they are moved under Megatron's own names"))
    return View(checkpoint, "mcore", None, args, dimensions(args), None, tensors, frozenset(), tuple(notes))


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A Megatron checkpoint understood: family, arguments, sizes, canonical weights, bindings, HF config, notes."""

    family: Family
    args: dict[str, Any]
    dims: Dimensions
    tensors: dict[str, TensorMetadata]
    bound: Bound
    config: dict[str, Any] | None
    notes: tuple[Note, ...]


def megatron_model(checkpoint: Checkpoint, family: str | None, hf_config: Mapping[str, Any] | None) -> MegatronModel:
    """Family, sizes and bindings of a Megatron checkpoint, from `hf_config` or else from the arguments stored in it."""
    where = checkpoint.location.directory
    notes: list[Note] = []
    weights = list(checkpoint.weights)
    if not weights:
        raise CkptError(
            "E222",
            "no model weights in this checkpoint",
            where=where,
            found=f"{len(checkpoint.tensors)} optimizer tensors",
            hint="if the weights lie beside it as safetensors, convert those",
        )
    tensors = canonical_tensors(checkpoint.locate_all(weights), where)
    stored = checkpoint.args
    if hf_config is None and stored is None and (folder := kept_hf_folder(checkpoint)):
        hf_config = read_json(os.path.join(folder, "config.json"))
        notes.append(Note("assumed", folder, "the checkpoint stores no model arguments: those of the config.json kept with it were taken"))
    if hf_config is not None:
        fam = family_named(family) if family else family_of_config(hf_config, "--hf-config")
        from_config, _ = args_from_config(hf_config, fam.rules, allow_unrepresentable=True)
        args = {**(stored or {}), **from_config}
        args["mtp_num_layers"] = from_config.get("mtp_num_layers") or (stored or {}).get("mtp_num_layers")
        args["padded_vocab_size"] = _rows(tensors, args)
    elif stored is not None:
        args = dict(stored)
        if family:
            fam = family_named(family)
        elif kept := _kept_family(checkpoint):
            fam = kept
        else:
            name, why = infer_family(args, tensors)
            fam = family_named(name)
            notes.append(Note("assumed", "", f"family {name}: {why}"))
        args["padded_vocab_size"] = _rows(tensors, args)
        _true_vocab(args, notes, where)
    else:
        raise CkptError(
            "E306",
            "the checkpoint stores no model arguments, so its heads and sizes are unknown",
            where=where,
            hint="give the HF config with --hf-config DIR",
        )
    dims = stored_dimensions(args, fam, tensors, "mcore", notes)
    bound = bind(fam, dims, tensors, "mcore", where)
    notes.extend(Note("dropped", name, why) for name, why in bound.left_out)
    notes += _carried(bound, tensors)
    config, told = config_from_args(
        args,
        fam.rules,
        architectures=list(fam.architectures[:1]),
        model_type=fam.model_types[0],
        template=hf_config,
        spelling=fam.spelling,
    )
    notes.extend(Note("config", "", text) for text in told)
    return MegatronModel(fam, args, dims, tensors, bound, config, tuple(notes))


def _kept_family(checkpoint: Checkpoint) -> Family | None:
    """The family that the HF config kept in a Megatron checkpoint names; None when there is none, or one of no known family."""
    folder = kept_hf_folder(checkpoint)
    if folder is None:
        return None
    try:
        return family_of_config(read_json(os.path.join(folder, "config.json")), folder)
    except CkptError:
        return None


def _rows(tensors: Mapping[str, TensorMetadata], args: Mapping[str, Any]) -> Any:
    embedding = tensors.get(EMBEDDING)
    return embedding.global_shape[0] if embedding else args.get("padded_vocab_size")


def _true_vocab(args: dict[str, Any], notes: list[Note], where: str) -> None:
    if not args.get("vocab_size"):
        args["vocab_size"] = args.get("padded_vocab_size")
        notes.append(
            Note(
                "assumed",
                EMBEDDING,
                f"the checkpoint does not say how many of its {args['vocab_size']} vocabulary rows are padding: "
                "all were kept (give --hf-config or --vocab-size)",
            )
        )


def _mcore_from_hf(checkpoint: Checkpoint, family: str | None, padded_vocab: int | None, allow_unrepresentable: bool) -> View:
    config, where = _config_of(checkpoint), checkpoint.location.directory
    fam = family_named(family) if family else family_of_config(config, where)
    args, told = args_from_config(config, fam.rules, allow_unrepresentable=allow_unrepresentable)
    notes = [Note("config", "", text) for text in told]
    if config.get("model_type") not in fam.model_types and (unread := unread_fields(config, fam.rules)):
        said = f"family {fam.name} was named for model type {config.get('model_type')!r}; it does not read these fields, which may matter"
        notes.append(Note("warning", ", ".join(unread), said))
    args["padded_vocab_size"] = padded_vocab or args.get("vocab_size")
    tensors, casts = dequantised(checkpoint.tensors, config, where)
    notes += casts
    stored = family_names(tensors, fam, where)
    dims = stored_dimensions(args, fam, stored, "hf", notes)
    bound = bind(fam, dims, stored, "hf", where)
    notes.extend(Note("dropped", name, why) for name, why in bound.left_out)
    notes += _carried(bound, stored)
    made = {}
    for binding in bound.bindings:
        _check_shapes(binding, dims, "hf", stored, where)
        made[binding.mcore] = _mcore_tensor(binding, dims, stored)
    return View(checkpoint, "mcore", fam, args, dims, without_quantisation(config), made, _kept(bound, "mcore"), tuple(notes))


def stored_dimensions(args: dict[str, Any], family: Family, present: Collection[str], side: str, notes: list[Note]) -> Dimensions:
    """Dimensions of `args`, from which prediction layers are taken out when none of their tensors is there."""
    dims = dimensions(args)
    if dims.mtp and not any(
        n in present for b in expand(family, dims) if b.mcore.startswith("mtp.") for n in (b.hf if side == "hf" else (b.mcore,))
    ):
        notes.append(Note("assumed", "", f"no prediction layer is stored, although the config counts {dims.mtp}: the model has none"))
        args["mtp_num_layers"] = None
        dims = dimensions(args)
    return dims


def _carried(bound: Bound, tensors: Mapping[str, TensorMetadata]) -> list[Note]:
    """What is kept under its own names because Megatron's model does not have it."""
    names = [b.mcore for b in bound.bindings if isinstance(b.mapping, Kept)]
    if not names:
        return []
    size = sum(tensors[n].nbytes for n in names)
    few = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    return [Note("carried", few, f"{len(names)} tensors ({size} bytes) that Megatron's GPT model does not have are kept as they are")]


def _config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.config is None:
        raise CkptError(
            "E306",
            "there is no config.json beside the weights",
            where=checkpoint.location.directory,
            hint="copy the model's config.json there, or give it with --hf-config DIR",
        )
    return checkpoint.config


def _kept(bound: Bound, side: str) -> frozenset[str]:
    return frozenset(n for b in bound.bindings if b.mapping.keep_dtype for n in (b.hf if side == "hf" else (b.mcore,)))


def _check_shapes(binding: Binding, dims: Dimensions, side: str, tensors: Mapping[str, TensorMetadata], where: str) -> None:
    expected: list[tuple[str, Shape]] = (
        [(binding.mcore, binding.mapping.mcore_shape(dims))]
        if side == "mcore"
        else list(zip(binding.hf, binding.mapping.hf_shapes(dims), strict=True))
    )
    for name, shape in expected:
        if tensors[name].global_shape != shape:
            d = dims.symbols
            sizes = f"hidden {d['H']}, heads {d['A']}, kv groups {d['G']}, head_dim {d['d']}, ffn {d.get('F')}, vocab {d['V']}"
            sizes += f" padded {dims.padded_vocab}"
            raise CkptError(
                "E302",
                f"{name} has not the shape that the model's config gives it",
                where=f"{where}: {name}",
                expected=f"{list(shape)}",
                found=f"{list(tensors[name].global_shape)} (config: {sizes})",
                hint="config and weights are of different models, or head_dim / vocab_size in the config is wrong",
            )


def _mcore_tensor(binding: Binding, dims: Dimensions, tensors: Mapping[str, TensorMetadata]) -> TensorMetadata:
    shape = binding.mapping.mcore_shape(dims)
    dtypes = {tensors[n].dtype for n in binding.hf}
    if len(dtypes) > 1:
        raise CkptError(
            "E307",
            f"tensors that make up {binding.mcore} have different dtypes",
            found=", ".join(f"{n} {tensors[n].dtype}" for n in binding.hf),
            hint="ask for one dtype with --dtype",
        )
    chunks: list[Chunk] = []
    for piece in binding.mapping.pieces(dims):
        for part in tensors[binding.hf[piece.source]].region(piece.hf, piece.shape):
            inner = tuple(a - b for a, b in zip(part.global_offset, piece.hf, strict=True))
            if piece.axes is None:
                chunks.append(part.moved(tuple(a + b for a, b in zip(inner, piece.mcore, strict=True))))
            else:
                offset = tuple(m + (0 if a < 0 else inner[a]) for a, m in zip(piece.axes, piece.mcore, strict=True))
                chunks.append(part.moved(offset, piece.axes))
    covered = max((c.global_offset[0] + c.local_shape[0] for c in chunks), default=0)
    if shape and covered < shape[0]:  # padding of the vocabulary
        chunks.append(Chunk((covered, *(0,) * (len(shape) - 1)), (shape[0] - covered, *shape[1:]), None))
    return TensorMetadata(binding.mcore, dtypes.pop(), shape, tuple(chunks))


def hf_tensors(binding: Binding, dims: Dimensions, tensor: TensorMetadata) -> dict[str, TensorMetadata]:
    """The HF tensors that are boxes of one Megatron tensor, which must have the shape that the binding gives it."""
    parts: dict[int, list[Chunk]] = {i: [] for i in range(len(binding.hf))}
    for piece in binding.mapping.pieces(dims):
        axes = piece.axes or tuple(range(len(piece.shape)))
        size = tuple(1 if a < 0 else piece.shape[a] for a in axes)
        back = tuple(axes.index(i) for i in range(len(piece.shape)))
        for chunk in tensor.chunks:
            box = intersect(chunk.global_offset, chunk.local_shape, piece.mcore, size)
            if box is None:
                continue
            part = chunk.cut(*box)
            inner = tuple(a - b for a, b in zip(box[0], piece.mcore, strict=True))
            offset = tuple(h + inner[m] for h, m in zip(piece.hf, back, strict=True))
            parts[piece.source].append(part.moved(offset) if piece.axes is None else part.moved(offset, back))
    shapes = binding.mapping.hf_shapes(dims)
    return {name: TensorMetadata(name, tensor.dtype, shapes[i], tuple(parts[i])) for i, name in enumerate(binding.hf)}


def hf_order(names: Iterable[str]) -> list[str]:
    """Names in the order of transformers' state_dict: parameters of one module stand together, where the module first appears."""
    listed = list(names)
    first: dict[str, int] = {}
    for position, name in enumerate(listed):
        first.setdefault(name.rpartition(".")[0], position)
    return sorted(listed, key=lambda n: first[n.rpartition(".")[0]])
