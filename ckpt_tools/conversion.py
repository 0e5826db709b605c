"""From an opened checkpoint and options to a plan: family, view, target layout, and everything a person must know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .adapters.beside import carried_adapter
from .adapters.export import adapter_of, plan_peft
from .adapters.fuse import plan_fused, verify_fused
from .checkpoint import Checkpoint, is_optimizer, open_checkpoint, open_location
from .checksums import check_checksums
from .dtypes import DTYPES, dtype
from .errors import CkptError
from .execution import Progress, Result, execute
from .formats.hf_writer import TargetLayout, layout_hf
from .formats.torch_legacy import Legacy
from .hf_layouts import family_names, fuse
from .hf_template import Template, final_config, find_template, side_copies
from .layer_cut import first_layers, within
from .megatron_target import has_optimizer, lay_out, prepared
from .notes import Note
from .options import ConvertOptions
from .planning import Plan, build_moves, cast_notes
from .quantised import dequantised
from .quantising import BLOCK, NOTHING, Float8, check_quantize, float8_of
from .replicas import check_copies, check_replicas
from .split import join, places_looked_at
from .tensors import TensorMetadata
from .views import View, as_hf, as_mcore
from .vocabulary import cut_notes, repad

FORMATS = ("hf", "torch_dist", "torch", "split", "peft")


def plan_conversion(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    """The plan that converts `checkpoint` as `options` say; reads headers only.

    Errors: CkptError E3xx when tensors, config and family do not fit, E410 for a conversion that is not possible.
    """
    if options.moe_layout not in (None, "per-expert", "fused"):
        raise CkptError("E410", f"there is no layout of experts {options.moe_layout!r}", expected="per-expert, fused")
    if options.to not in FORMATS:
        raise CkptError("E410", f"ckpt cannot write the format {options.to!r}", expected=", ".join(FORMATS))
    if options.max_layers is not None and options.to != "torch_dist":
        raise CkptError("E410", f"layers cannot be left out of the format {options.to!r}", expected="torch_dist")
    check_quantize(options)
    if options.to == "peft":
        return plan_peft(checkpoint, options)
    if checkpoint.format == "peft":
        return plan_fused(checkpoint, options)
    checkpoint, notes = choose_weights(checkpoint, options)
    if notes:
        made = plan_conversion(checkpoint, options)
        return replace(made, notes=(*notes, *made.notes))
    if checkpoint.format not in ("hf", "torch_dist", "torch_dcp", "torch"):
        raise CkptError(
            "E410", f"there are no weights to convert in a checkpoint of format {checkpoint.format!r}", where=checkpoint.location.directory
        )
    if isinstance(checkpoint.details, Legacy):
        if options.replicas == "first":
            notes = [Note("assumed", "", "copies on other ranks were not compared; the first rank's was used, as asked")]
        else:
            check_replicas(checkpoint.details, buffer=options.buffer)
    if options.check_crc:
        notes = [*notes, check_checksums(checkpoint)]
    if not checkpoint.weights:
        raise CkptError(
            "E222",
            "there are no model weights here",
            where=checkpoint.location.directory,
            expected="weights in the iteration folder, or safetensors beside it",
            found=f"none in {places_looked_at(checkpoint)}",
            hint="this is the training state of a split checkpoint: put the model's safetensors beside it",
        )
    made = {"hf": _plan_hf, "split": _plan_split}.get(options.to, _plan_megatron)(checkpoint, options)
    copies, told = carried_adapter(checkpoint, wanted=options.adapter)
    return replace(made, copies=(*made.copies, *copies), notes=(*notes, *told, *made.notes))


def plan(source: str | os.PathLike[str] | Checkpoint, to: str, *, iteration: str | int = "latest", **options: Any) -> Plan:
    """The plan that converts `source` (a path or an opened Checkpoint) to format `to`.

        execute(plan("llama/", "torch_dist", layout=ParallelLayout(tp=2)), "run/")

    options: fields of ConvertOptions. Errors: as open_checkpoint and plan_conversion.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, iteration)
    return plan_conversion(checkpoint, ConvertOptions(to=to, **options))


def choose_weights(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[Checkpoint, list[Note]]:
    """The checkpoint whose weights are to be converted: of a split checkpoint the safetensors beside the iteration folder.

    For a Megatron target the two are joined, so that optimizer and counters come along. When weights are stored in
    both places they must be equal, or --weights-from must say which counts. Errors: E413 they differ.
    """
    beside = checkpoint.location.weights
    if beside is None or checkpoint.format == "hf":
        return checkpoint, []
    location = replace(checkpoint.location, directory=beside, format="hf", weights=None)
    whole = options.to != "hf" and checkpoint.format in ("torch_dist", "state")
    if not checkpoint.weights:
        told = Note("assumed", beside, "the iteration folder holds no weights; those beside it are converted")
        if whole:
            return join(checkpoint, open_location(location), family=options.family), [told]
        return open_location(location), [told, *_dropped_state(checkpoint)]
    if options.weights_from == "megatron":
        return replace(checkpoint, location=replace(checkpoint.location, weights=None)), [
            Note("assumed", beside, "weights are stored twice; Megatron's were used, as asked")
        ]
    other = open_location(location)
    if options.weights_from == "safetensors":
        told = Note("assumed", beside, "weights are stored twice; the safetensors were used, as asked")
        if whole:
            return join(checkpoint, other, family=options.family), [told]
        return other, [told, *_dropped_state(checkpoint)]
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
    view, laid, dtypes, notes, float8 = _hf_folder(checkpoint, options)
    details = {"format": "hf", **({"quantised": options.quantize} if options.quantize else {})}
    return _finish(checkpoint, view, laid, dtypes, [*notes, *_dropped_state(checkpoint)], options, details, float8)


def _plan_split(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    """The HF folder of the weights, and in an iteration folder inside it everything else."""
    view, laid, dtypes, notes, _ = _hf_folder(checkpoint, options)
    megatron = as_mcore(_with_vocab(checkpoint, options), family=options.family, allow_unrepresentable=options.allow_unrepresentable)
    ready = prepared(checkpoint, megatron, options)
    state, told, details = lay_out(checkpoint, ready, _target_dtypes(ready.view, options.dtype), options, weights=False)
    optimizer = {} if ready.optimizer is None else ready.optimizer.tensors
    files = len(laid.files)
    both = TargetLayout(
        (*laid.files, *state.files),
        (*laid.placements, *(replace(p, file=p.file + files) for p in state.placements)),
        (*laid.copies, *state.copies),
    )
    merged = replace(view, tensors={**view.tensors, **optimizer}, keep_dtype=view.keep_dtype | optimizer.keys())
    dtypes |= {} if ready.optimizer is None else ready.optimizer.dtypes
    notes += [n for n in told if n not in notes]
    return _finish(checkpoint, merged, both, dtypes, notes, options, {**details, "format": "split"})


def _hf_folder(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[View, TargetLayout, dict[str, str], list[Note], Float8]:
    view, template, casts = _hf_view(checkpoint, options)
    float8 = float8_of(view, options)
    dtypes = _target_dtypes(view, options.dtype)
    stay = {n: d for n, d in dtypes.items() if n not in float8.weights}
    config, notes = final_config(view, template, stay, options, float8.config() if float8.weights else None)
    dtypes = float8.dtypes(dtypes)
    layout = layout_hf(
        float8.laid_out(view.tensors),
        dtypes,
        config=config,
        shard_size=options.max_shard_size,
        weight_map=template.weight_map,
        metadata=template.metadata,
        copies=side_copies(template),
    )
    return view, layout, dtypes, [*notes, *template.notes, *casts, *cut_notes(view), *float8.notes(view.tensors)], float8


def _hf_view(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[View, Template, list[Note]]:
    """What an HF target holds before it is cast or quantised, the HF folder it follows, and the notes of dequantising the source."""
    template = find_template(checkpoint, options)
    casts: list[Note] = []
    if checkpoint.format == "hf":
        meant, casts = _hf_tensors(checkpoint, options)
        view = replace(as_hf(checkpoint, family=options.family), tensors=meant)
    else:
        view = as_hf(
            _with_vocab(checkpoint, options), family=options.family, hf_config=template.config, repeated=template.weight_map
        )
    if options.moe_layout is not None:
        view = replace(view, tensors=_moe_layout(view, options.moe_layout))
    return view, template, casts


def _hf_tensors(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[dict[str, TensorMetadata], list[Note]]:
    """What an HF target holds of an HF source: the tensors as they are, or, when a dtype or a quantisation was asked for, dequantised."""
    where = checkpoint.location.directory
    tensors = dict(checkpoint.tensors)
    notes: list[Note] = []
    if options.dtype is not None or options.quantize is not None:
        tensors, notes = dequantised(checkpoint.tensors, checkpoint.config, where)
    if options.moe_layout is not None or options.quantize is not None:  # quantised experts are written one by one
        family = as_hf(checkpoint, family=options.family).family
        tensors = family_names(tensors, family, where) if family else tensors
    return tensors, notes


def _moe_layout(view: View, wanted: str) -> dict[str, TensorMetadata]:
    fused = view.family.fused if view.family else ()
    if wanted == "per-expert":
        if any(spec.only for spec in fused):
            raise CkptError("E410", "files of this family hold the experts of a layer in one tensor only", hint="leave out --moe-layout")
        return view.tensors
    if view.family is None or not fused:
        raise CkptError("E410", "this family has no fused form of experts", hint="leave out --moe-layout fused")
    return fuse(view.tensors, view.family)


def _plan_megatron(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    view = as_mcore(_with_vocab(checkpoint, options), family=options.family, allow_unrepresentable=options.allow_unrepresentable)
    if checkpoint.format == "hf" and view.family:
        check_copies(checkpoint, view, buffer=options.buffer)
    ready = prepared(checkpoint, view, options)
    ready, cut = first_layers(ready, options.max_layers) if options.max_layers is not None else (ready, [])
    dtypes = _target_dtypes(ready.view, options.dtype)
    laid, notes, details = lay_out(checkpoint, ready, dtypes, options)
    notes = [*cut, *notes]
    if ready.optimizer is not None:
        dtypes |= ready.optimizer.dtypes
    return _finish(checkpoint, ready.view, laid, dtypes, notes, options, details)


def _finish(
    checkpoint: Checkpoint,
    view: View,
    laid: TargetLayout,
    dtypes: Mapping[str, str],
    notes: list[Note],
    options: ConvertOptions,
    target: dict[str, Any],
    float8: Float8 = NOTHING,
) -> Plan:
    builder = build_moves(view.tensors, [p for p in laid.placements if not float8.makes(p.name)])
    placed = {p.name: p for p in laid.placements if float8.makes(p.name)}
    for name, scales in float8.weights.items():
        builder.encode(view.tensors[name], placed[name], placed[scales], BLOCK)
    location = checkpoint.location
    source = {"path": location.directory, "format": checkpoint.format, "iteration": location.label, "chosen": location.chosen}
    target = {**target, "family": view.family.name if view.family else None}
    warnings = [Note("warning", "", w) for w in checkpoint.warnings]
    kept = [Note("kept", n, f"stays {dtypes[n]}") for n in sorted(view.keep_dtype) if options.dtype and dtypes.get(n) != options.dtype]
    casts = cast_notes(view.tensors, {n: d for n, d in dtypes.items() if not float8.makes(n)})
    everything = (*warnings, *view.notes, *notes, *kept, *casts)
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
        tuple(builder.encodings),
    )


def _target_dtypes(view: View, wanted: str | None) -> dict[str, str]:
    target = dtype(wanted).name if wanted else None
    if target and not DTYPES[target].floating:
        raise CkptError("E206", f"--dtype takes a floating dtype, not {target}")
    return {n: target if target and DTYPES[t.dtype].floating and n not in view.keep_dtype else t.dtype for n, t in view.tensors.items()}


def _with_vocab(checkpoint: Checkpoint, options: ConvertOptions) -> Checkpoint:
    if options.vocab is None or checkpoint.common is None or checkpoint.args is None:
        return checkpoint
    args = type(checkpoint.args)(checkpoint.args)
    args["vocab_size"] = options.vocab
    return replace(checkpoint, common={**checkpoint.common, "args": args})


def _dropped_state(checkpoint: Checkpoint) -> list[Note]:
    optimizer = [n for n in checkpoint.tensors if is_optimizer(n)]
    notes = []
    if has_optimizer(checkpoint) and not optimizer:
        notes.append(Note("dropped", "optimizer", "optimizer state: an HF folder has no place for it"))
    if optimizer:
        size = sum(checkpoint.tensors[n].nbytes for n in optimizer)
        notes.append(Note("dropped", "optimizer", f"{len(optimizer)} optimizer tensors ({size} bytes): an HF folder has no place for them"))
    others = sorted({o.key for o in checkpoint.objects.values()} - {"common_state"})
    others = [k for k in others if not k.endswith("_extra_state") and not k.startswith(("optimizer", "chained"))]
    if others:
        notes.append(Note("dropped", ", ".join(others), "training state that an HF folder has no place for"))
    if checkpoint.common is not None:
        state = [k for k in ("opt_param_scheduler", "iteration", "rerun_state_machine", "rng_state") if checkpoint.common.get(k)]
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
    resume: bool = False,
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
        resume=resume,
        on_progress=on_progress,
        before_commit=check if verify else None,
    )


def verify_conversion(checkpoint: Checkpoint, written: str, options: ConvertOptions, *, buffer: int, threads: int) -> int:
    """Compare the source with `written` through the inverse mapping; returns the bytes compared. Errors as verify.compare."""
    from .verify import compare

    if options.to == "peft":
        written_tensors = open_checkpoint(written).tensors
        return compare(adapter_of(checkpoint, options).tensors, written_tensors, buffer=buffer, threads=threads)
    if checkpoint.format == "peft":
        return verify_fused(checkpoint, open_checkpoint(written), options, buffer=buffer, threads=threads)
    chosen = replace(options, weights_from="megatron") if options.weights_from == "auto" else options  # planning has compared the copies
    checkpoint, _ = choose_weights(checkpoint, chosen)
    result, _ = choose_weights(open_checkpoint(written), options)
    if options.quantize is not None:  # the inverse gives other numbers: the source is quantised again, and every byte must be the same
        view, _, _ = _hf_view(checkpoint, options)
        float8 = float8_of(view, options)
        return compare(view.tensors, result.tensors, buffer=buffer, threads=threads, quantised=float8.weights, block=BLOCK)
    if checkpoint.format == "hf" and options.max_layers is None:
        if result.format == "hf":
            expected = _hf_tensors(checkpoint, options)[0]
            found = result.tensors if options.moe_layout is None else _hf_tensors(result, options)[0]
            return compare(expected, found, buffer=buffer, threads=threads)
        made = as_hf(result, family=options.family, hf_config=checkpoint.config)
        taken = as_mcore(checkpoint, family=options.family, allow_unrepresentable=True)
        left_out = {n.subject for n in taken.notes if n.kind == "dropped"}
        where = checkpoint.location.directory
        meant, _ = dequantised(checkpoint.tensors, checkpoint.config, where)
        stored, found = (family_names(t, taken.family, where) if taken.family else t for t in (meant, made.tensors))
        expected = {n: t for n, t in stored.items() if n not in left_out}
    else:
        source = as_mcore(_with_vocab(checkpoint, options), family=options.family)
        made = as_mcore(result, family=options.family, allow_unrepresentable=True)
        if options.to != "hf":
            source, made = prepared(checkpoint, source, options).view, prepared(result, made, options).view
        rows = int(source.args.get("vocab_size") or source.dims.padded_vocab)
        expected, found = dict(repad(source, rows).tensors), dict(repad(made, rows).tensors)
        expected = expected if options.max_layers is None else within(expected, options.max_layers)
    return compare(expected, found, buffer=buffer, threads=threads)
