"""From an opened checkpoint and options to a plan: family, view, target layout, and everything a person must know."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .checkpoint import Checkpoint, is_optimizer, open_checkpoint, open_location
from .dtypes import DTYPES, dtype
from .errors import CkptError
from .execution import Progress, Result, execute
from .families.config import padded_vocab
from .families.megatron_args import DTYPE_ATTRIBUTES, checkpoint_args
from .formats import hf as hf_format
from .formats.hf_writer import TargetLayout, config_bytes, layout_hf
from .formats.pickles import DTypeRef, Namespace
from .formats.torch_dist_writer import FILE_BYTES, layout_torch_dist
from .layout import ParallelLayout
from .naming import homogeneous
from .notes import Note
from .planning import Copied, Plan, TargetFile, build_moves, cast_notes
from .tensors import Chunk, TensorMetadata
from .views import View, as_hf, as_mcore

HF_FOLDER = "hf"  # inside an iteration folder: config, tokenizer and other files of the HF model, as Megatron-Bridge keeps them
WEIGHT_MAP = ".ckpt-weight-map.json"  # there too: the shard layout of the HF folder, so that converting back makes the same files
FORMATS = ("hf", "torch_dist")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What the target should be like. None means: as the source, or the format's default.

    to "hf" | "torch_dist"; family overrides detection; hf_config folder or file with the config to follow; dtype of floating tensors;
    layer_keys "auto" | "stacked" | "per-layer"; layout ranks to cut for; iteration number to write (None = `release`);
    max_shard_size bytes; weights_from "auto" | "safetensors" | "megatron" when a checkpoint holds both; divisible_by, padded_vocab,
    vocab the vocabulary sizes; buffer bytes per thread.
    """

    to: str
    family: str | None = None
    hf_config: str | None = None
    dtype: str | None = None
    layer_keys: str = "auto"
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    iteration: int | None = None
    max_shard_size: int | None = None
    divisible_by: int | None = None
    padded_vocab: int | None = None
    vocab: int | None = None
    weights_from: str = "auto"
    strip_remote_code: bool = False
    allow_unrepresentable: bool = False
    buffer: int = 256 * 1024


def plan_conversion(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    """The plan that converts `checkpoint` as `options` say; reads headers only.

    Errors: CkptError E3xx when tensors, config and family do not fit, E410 for a conversion that is not possible.
    """
    if options.to not in FORMATS:
        raise CkptError("E410", f"ckpt cannot write the format {options.to!r}", expected=", ".join(FORMATS))
    checkpoint, notes = choose_weights(checkpoint, options)
    if notes:
        made = plan_conversion(checkpoint, options)
        return replace(made, notes=(*notes, *made.notes))
    if checkpoint.format not in ("hf", "torch_dist", "torch_dcp"):
        raise CkptError(
            "E410", f"there are no weights to convert in a checkpoint of format {checkpoint.format!r}", where=checkpoint.location.directory
        )
    if options.to == "hf":
        return _plan_hf(checkpoint, options)
    return _plan_torch_dist(checkpoint, options)


def plan(source: str | os.PathLike[str] | Checkpoint, to: str, *, iteration: str | int = "latest", **options: Any) -> Plan:
    """The plan that converts `source` (a path or an opened Checkpoint) to format `to`.

        execute(plan("llama/", "torch_dist", layout=ParallelLayout(tp=2)), "run/")

    options: fields of ConvertOptions. Errors: as open_checkpoint and plan_conversion.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, iteration)
    return plan_conversion(checkpoint, ConvertOptions(to=to, **options))


def choose_weights(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[Checkpoint, list[Note]]:
    """The checkpoint whose weights are to be converted: of a split checkpoint the safetensors beside the iteration folder.

    When weights are stored in both places they must be equal, or --weights-from must say which counts. Errors: E413 they differ.
    """
    beside = checkpoint.location.weights
    if beside is None or checkpoint.format == "hf":
        return checkpoint, []
    location = replace(checkpoint.location, directory=beside, format="hf", weights=None)
    if not checkpoint.weights:
        return open_location(location), [
            Note("assumed", beside, "the iteration folder holds no weights; those beside it are converted"),
            *_dropped_state(checkpoint),
        ]
    if options.weights_from == "megatron":
        return replace(checkpoint, location=replace(checkpoint.location, weights=None)), [
            Note("assumed", beside, "weights are stored twice; Megatron's were used, as asked")
        ]
    other = open_location(location)
    if options.weights_from == "safetensors":
        return other, [
            Note("assumed", beside, "weights are stored twice; the safetensors were used, as asked"),
            *_dropped_state(checkpoint),
        ]
    from .verify import compare

    try:
        compare(other.tensors, as_hf(checkpoint, family=options.family, hf_config=other.config).tensors, buffer=options.buffer, threads=2)
    except CkptError as error:
        raise CkptError(
            "E413",
            "the weights are stored twice and the copies differ",
            where=f"{checkpoint.location.directory} and {beside}",
            found=f"{error.what}: {error.where}, {error.found}",
            hint="say which copy counts: --weights-from safetensors or --weights-from megatron",
        ) from None
    wasted = sum(t.nbytes for t in other.tensors.values())
    return replace(checkpoint, location=replace(checkpoint.location, weights=None)), [
        Note("warning", beside, f"the weights are stored twice ({wasted} bytes too many); the copies are equal")
    ]


def _plan_hf(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    template = _template(checkpoint, options)
    if checkpoint.format == "hf":
        view = as_hf(checkpoint, family=options.family)
    else:
        view = as_hf(_with_vocab(checkpoint, options), family=options.family, hf_config=template.config)
    dtypes = _target_dtypes(view, options.dtype)
    config, notes = _final_config(view, template, dtypes, options)
    copies = (
        tuple(Copied(os.path.join(template.folder, n), n, os.path.getsize(os.path.join(template.folder, n))) for n in template.files)
        if template.folder
        else ()
    )
    layout = layout_hf(
        view.tensors,
        dtypes,
        config=config,
        shard_size=options.max_shard_size,
        weight_map=template.weight_map,
        metadata=template.metadata,
        copies=copies,
    )
    notes += [*template.notes, *_cut_notes(view), *_dropped_state(checkpoint)]
    return _finish(checkpoint, view, layout, dtypes, notes, options, {"format": "hf"})


def _plan_torch_dist(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    if checkpoint.format != "hf" and any(is_optimizer(n) for n in checkpoint.tensors):
        raise CkptError(
            "E410",
            "this would leave the optimizer state behind",
            where=checkpoint.location.directory,
            hint="`ckpt reshard` carries it along",
        )
    view = as_mcore(checkpoint, family=options.family, allow_unrepresentable=options.allow_unrepresentable)
    rows = _padded_rows(view, options)
    view = repad(view, rows)
    dtypes = _target_dtypes(view, options.dtype)
    layout = options.layout
    args = {**view.args, "padded_vocab_size": rows, "make_vocab_size_divisible_by": _divisor(view, options)}
    if len(set(dtypes.values())) == 1:
        args["params_dtype"] = next(iter(dtypes.values()))
    stored = checkpoint_args(args, layout=layout.arguments(), iteration=options.iteration or 0)
    for name in DTYPE_ATTRIBUTES:
        if isinstance(stored.get(name), str):
            stored[name] = DTypeRef(stored[name])
    alike = homogeneous(view.tensors)
    if options.layer_keys == "stacked" and not alike:
        raise CkptError(
            "E410", "the layers of this model are not alike, so Megatron cannot store them as one tensor", hint="use --layer-keys per-layer"
        )
    stacked = alike and not _needs_layer_keys(args) if options.layer_keys == "auto" else options.layer_keys == "stacked"
    common = {
        "args": Namespace(stored),
        "checkpoint_version": 3.0,
        "iteration": options.iteration or 0,
        "num_floating_point_operations_so_far": 0.0,
        # Megatron asks for the keys that this names, stacked unless it says otherwise
        "content_metadata": {"singleton_local_shards": False, **({} if stacked else {"non_homogeneous_layers": True})},
    }
    template = _template(checkpoint, options)
    folder = "release" if options.iteration is None else f"iter_{options.iteration:07d}"
    extra, notes = _carried(checkpoint, template, folder)
    laid = layout_torch_dist(
        view.tensors,
        dtypes,
        common=common,
        iteration=options.iteration,
        stacked=stacked,
        layers=view.dims.layers,
        layout=layout,
        gated=bool(args.get("swiglu", True)),
        copies=tuple(
            Copied(os.path.join(template.folder, n), f"{folder}/{HF_FOLDER}/{n}", os.path.getsize(os.path.join(template.folder, n)))
            for n in template.files
        )
        if template.folder
        else (),
        file_bytes=options.max_shard_size or FILE_BYTES,
    )
    laid = replace(laid, files=(*laid.files[:-1], *extra, laid.files[-1]))
    notes += [*template.notes, *_pad_notes(view)]
    details = {
        "format": "torch_dist",
        "layer_keys": "stacked" if stacked else "per-layer",
        "iteration": "release" if options.iteration is None else options.iteration,
        "tp": layout.tp,
        "pp": layout.pp,
        "padded_vocab_size": rows,
    }
    return _finish(checkpoint, view, laid, dtypes, notes, options, details)


def _finish(
    checkpoint: Checkpoint,
    view: View,
    laid: TargetLayout,
    dtypes: Mapping[str, str],
    notes: list[Note],
    options: ConvertOptions,
    target: dict[str, Any],
) -> Plan:
    builder = build_moves(view.tensors, laid.placements)
    location = checkpoint.location
    source = {"path": location.directory, "format": checkpoint.format, "iteration": location.label, "chosen": location.chosen}
    target = {**target, "family": view.family.name}
    warnings = [Note("warning", "", w) for w in checkpoint.warnings]
    kept = [Note("kept", n, f"stays {dtypes[n]}") for n in sorted(view.keep_dtype) if options.dtype and dtypes.get(n) != options.dtype]
    everything = (*warnings, *view.notes, *notes, *kept, *cast_notes(view.tensors, dtypes))
    return Plan(
        source,
        target,
        builder.sources(),
        laid.files,
        laid.copies,
        tuple(builder.moves),
        everything,
        len({p.name for p in laid.placements}),
        options.buffer,
    )


def _target_dtypes(view: View, wanted: str | None) -> dict[str, str]:
    target = dtype(wanted).name if wanted else None
    if target and not DTYPES[target].floating:
        raise CkptError("E206", f"--dtype takes a floating dtype, not {target}")
    return {n: target if target and DTYPES[t.dtype].floating and n not in view.keep_dtype else t.dtype for n, t in view.tensors.items()}


@dataclass(frozen=True, slots=True)
class _Template:
    """The HF folder whose config and side files are followed: config, its raw bytes, folder and side files, shard layout, notes."""

    config: dict[str, Any] | None = None
    raw: bytes | None = None
    folder: str | None = None
    files: tuple[str, ...] = ()
    weight_map: dict[str, str] | None = None
    metadata: Mapping[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    notes: tuple[Note, ...] = ()


def _template(checkpoint: Checkpoint, options: ConvertOptions) -> _Template:
    folder = options.hf_config
    if folder is None and checkpoint.format == "hf":
        folder = checkpoint.folder if checkpoint.config is not None else None
    if folder is None:
        places = [os.path.join(checkpoint.location.directory, HF_FOLDER), checkpoint.location.root or ""]
        folder = next((p for p in places if p and os.path.isfile(os.path.join(p, "config.json"))), None)
    if folder is None:
        if options.to == "hf":
            return _Template(
                notes=(
                    Note(
                        "warning",
                        "",
                        "no HF folder was given: config.json is made from the checkpoint's arguments, and there is no tokenizer, "
                        "generation_config.json or chat template (give --hf-config DIR)",
                    ),
                )
            )
        return _Template()
    path = folder if os.path.isfile(folder) else os.path.join(folder, "config.json")
    if not os.path.exists(path):
        raise CkptError("E306", "there is no config.json in the folder given", where=folder)
    config = hf_format.read_json(path)
    with open(path, "rb") as file:
        raw = file.read()
    folder = os.path.dirname(path)
    files, warnings = hf_format.side_files(folder)
    notes = [Note("warning", "", w) for w in warnings]
    weight_map: Any = None  # from files: checked below
    metadata: Any = {"format": "pt"}
    if checkpoint.format == "hf" and isinstance(checkpoint.details, hf_format.HfFolder):
        weight_map, metadata = checkpoint.details.weight_map, checkpoint.details.metadata
    elif os.path.exists(stored := os.path.join(folder, WEIGHT_MAP)):
        value = hf_format.read_json(stored)
        weight_map, metadata = value.get("weight_map"), value.get("metadata", metadata)
    elif os.path.exists(index := os.path.join(folder, hf_format.INDEX_NAME)):
        weight_map = hf_format.read_json(index).get("weight_map")
    if weight_map is not None and not (
        isinstance(weight_map, dict)
        and all(isinstance(v, str) for v in weight_map.values())
        and all(map(hf_format.is_safe_name, set(weight_map.values())))
    ):
        weight_map = None
        notes.append(Note("warning", "", "the shard layout beside the config is not usable and was not followed"))
    files = tuple(f for f in files if f != WEIGHT_MAP)
    config, files = _remote_code(config, files, notes, options.strip_remote_code)
    return _Template(config, raw, folder, files, weight_map, metadata, tuple(notes))


def _remote_code(config: dict[str, Any], files: tuple[str, ...], notes: list[Note], strip: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    code = config.get("auto_map")
    if not isinstance(code, dict):
        return config, files
    if strip:
        notes.append(Note("dropped", "auto_map", "remote code was left out as asked"))
        return {k: v for k, v in config.items() if k != "auto_map"}, tuple(f for f in files if not f.endswith(".py"))
    for value in code.values():
        for reference in value if isinstance(value, list) else [value]:
            module = str(reference).rpartition(".")[0].rpartition("--")[2]
            if module and "--" not in str(reference) and f"{module}.py" not in files:
                notes.append(Note("warning", "auto_map", f"config.json points to {module}.py, which is not in the folder"))
    return config, files


def _carried(checkpoint: Checkpoint, template: _Template, folder: str) -> tuple[list[TargetFile], list[Note]]:
    extra: list[TargetFile] = []
    if template.raw is not None and template.config is not None:
        extra.append(TargetFile(f"{folder}/{HF_FOLDER}/config.json", len(template.raw), ((0, template.raw),)))
        if template.weight_map is not None or template.metadata != {"format": "pt"}:
            data = json.dumps({"metadata": template.metadata, "weight_map": template.weight_map}, sort_keys=True).encode()
            extra.append(TargetFile(f"{folder}/{HF_FOLDER}/{WEIGHT_MAP}", len(data), ((0, data),)))
        names = ", ".join(("config.json", *template.files))
        return extra, [Note("carried", names, f"{1 + len(template.files)} files of the HF model are kept in {folder}/{HF_FOLDER}")]
    return extra, []


def _final_config(view: View, template: _Template, dtypes: Mapping[str, str], options: ConvertOptions) -> tuple[bytes | None, list[Note]]:
    config = template.config if view.source.format == "hf" else view.config
    if config is None:
        return None, []
    notes: list[Note] = []
    counts: dict[str, int] = {}
    for name in dtypes.values():
        if DTYPES[name].floating:
            counts[name] = counts.get(name, 0) + 1
    main = max(counts, key=lambda n: counts[n], default=None)
    result = dict(config)
    for key in dtype_keys(config):
        declared = config.get(key)
        if main and declared is not None and str(declared).removeprefix("torch.") != main:
            if options.dtype or template.config is None:
                result[key] = main
            else:
                notes.append(
                    Note(
                        "warning",
                        "config.json",
                        f"says {key} {declared}, the tensors are {', '.join(f'{n} x{c}' for n, c in sorted(counts.items()))}",
                    )
                )
    if main and not any(config.get(k) for k in dtype_keys(config)):
        result["dtype"] = main
    if template.raw is not None and result == json.loads(template.raw.decode("utf-8-sig")):
        return template.raw, notes
    if template.config is not None:
        return (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode(), notes
    return config_bytes(result), notes


def dtype_keys(config: Mapping[str, Any]) -> list[str]:
    """The spellings of the dtype that a config uses; transformers 5's when it uses none."""
    return [k for k in ("dtype", "torch_dtype") if k in config] or ["dtype"]


def _with_vocab(checkpoint: Checkpoint, options: ConvertOptions) -> Checkpoint:
    if options.vocab is None or checkpoint.common is None or checkpoint.args is None:
        return checkpoint
    args = type(checkpoint.args)(checkpoint.args)
    args["vocab_size"] = options.vocab
    return replace(checkpoint, common={**checkpoint.common, "args": args})


def _divisor(view: View, options: ConvertOptions) -> int:
    return int(options.divisible_by or view.args.get("make_vocab_size_divisible_by") or 128)


def _padded_rows(view: View, options: ConvertOptions) -> int:
    vocab = int(view.args.get("vocab_size") or view.dims.padded_vocab)
    rows = options.padded_vocab or padded_vocab(vocab, _divisor(view, options), options.layout.tp)
    if rows < vocab or rows % options.layout.tp:
        raise CkptError(
            "E301",
            "the padded vocabulary does not fit",
            expected=f"at least {vocab} rows, a multiple of tp {options.layout.tp}",
            found=str(rows),
        )
    return rows


def _needs_layer_keys(args: Mapping[str, Any]) -> bool:
    """Whether Megatron itself would index the layers in the keys (source: transformer_block.py, 0.16)."""
    frequency = args.get("moe_layer_freq", 1)
    return isinstance(frequency, (list, tuple)) or (isinstance(frequency, int) and frequency > 1)


def repad(view: View, rows: int) -> View:
    """The view with vocabulary tables of `rows` rows: true rows kept, zeros after them."""
    vocab = int(view.args.get("vocab_size") or view.dims.padded_vocab)
    tensors = dict(view.tensors)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"):
        tensor = tensors.get(name)
        if tensor is None or tensor.global_shape[0] == rows:
            continue
        rest = tensor.global_shape[1:]
        chunks = list(tensor.region((0,) * (1 + len(rest)), (min(vocab, tensor.global_shape[0]), *rest)))
        if rows > vocab:
            chunks.append(Chunk((vocab, *(0,) * len(rest)), (rows - vocab, *rest), None))
        tensors[name] = TensorMetadata(name, tensor.dtype, (rows, *rest), tuple(chunks))
    return replace(view, tensors=tensors, args={**view.args, "padded_vocab_size": rows})


def _pad_notes(view: View) -> list[Note]:
    vocab, rows = int(view.args.get("vocab_size") or 0), int(view.args["padded_vocab_size"])
    names = [n for n in view.tensors if n in ("embedding.word_embeddings.weight", "output_layer.weight")]
    return [Note("padded", ", ".join(names), f"{rows - vocab} zero rows after {vocab}")] if rows > vocab else []


def _cut_notes(view: View) -> list[Note]:
    rows, vocab = view.dims.padded_vocab, view.dims.symbols["V"]
    if view.source.format == "hf" or rows <= vocab:
        return []
    return [Note("cut", "vocabulary", f"{rows - vocab} padding rows after {vocab} are not part of the model")]


def _dropped_state(checkpoint: Checkpoint) -> list[Note]:
    optimizer = [n for n in checkpoint.tensors if is_optimizer(n)]
    notes = []
    if optimizer:
        size = sum(checkpoint.tensors[n].nbytes for n in optimizer)
        notes.append(Note("dropped", "optimizer", f"{len(optimizer)} optimizer tensors ({size} bytes): an HF folder has no place for them"))
    others = sorted({o.key for o in checkpoint.objects.values()} - {"common_state"})
    others = [k for k in others if not k.endswith("_extra_state") and not k.startswith(("optimizer", "chained"))]
    if others:
        notes.append(Note("dropped", ", ".join(others), "training state that an HF folder has no place for"))
    if checkpoint.common is not None:
        state = [k for k in ("opt_param_scheduler", "iteration", "rerun_state_machine") if checkpoint.common.get(k)]
        if state:
            notes.append(Note("dropped", ", ".join(state), "training state that an HF folder has no place for"))
    return notes


def run_conversion(
    plan: Plan,
    checkpoint: Checkpoint,
    destination: str,
    options: ConvertOptions,
    *,
    threads: int = 2,
    fsync: bool = True,
    overwrite: bool = False,
    verify: bool = False,
    on_progress: Progress | None = None,
) -> Result:
    """Execute a conversion plan; with `verify`, the result is read back under the source's naming and compared before it appears."""

    def check(folder: str) -> int:
        return verify_conversion(checkpoint, folder, options, buffer=plan.buffer, threads=threads)

    return execute(
        plan,
        destination,
        threads=threads,
        fsync=fsync,
        overwrite=overwrite,
        on_progress=on_progress,
        before_commit=check if verify else None,
    )


def verify_conversion(checkpoint: Checkpoint, written: str, options: ConvertOptions, *, buffer: int, threads: int) -> int:
    """Compare the source with `written` through the inverse mapping; returns the bytes compared. Errors as verify.compare."""
    from .verify import compare

    checkpoint, _ = choose_weights(checkpoint, options)
    result = open_checkpoint(written)
    if checkpoint.format == "hf":
        found = as_hf(result, family=options.family, hf_config=checkpoint.config).tensors if result.format != "hf" else result.tensors
        left_out = {n.subject for n in as_mcore(checkpoint, family=options.family, allow_unrepresentable=True).notes if n.kind == "dropped"}
        expected = {n: t for n, t in checkpoint.tensors.items() if n not in left_out}
    else:
        source = as_mcore(_with_vocab(checkpoint, options), family=options.family)
        rows = int(source.args.get("vocab_size") or source.dims.padded_vocab)
        expected = dict(repad(source, rows).tensors)
        found = dict(repad(as_mcore(result, family=options.family), rows).tensors)
    return compare(expected, found, buffer=buffer, threads=threads)
