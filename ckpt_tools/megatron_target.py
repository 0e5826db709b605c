"""Planning what Megatron reads: torch_dist and the legacy `torch` format, from any view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .checkpoint import Checkpoint, is_optimizer
from .errors import CkptError
from .families.family import is_carried
from .families.megatron_args import DTYPE_ATTRIBUTES, checkpoint_args, flags_not_restored, is_gated
from .formats.hf_writer import TargetLayout
from .formats.pickles import DTypeRef, Namespace
from .formats.torch_dist_writer import FILE_BYTES, layout_torch_dist
from .formats.torch_legacy import Legacy
from .formats.torch_legacy_writer import layout_legacy
from .hf_template import carried_files, find_template
from .layout import ParallelLayout, expert_count, expert_of
from .legacy_target import layer_spec, rank_states, spec_args
from .naming import homogeneous, of_local_spec
from .notes import Note
from .optimizer.entries import FULLY_RESHARDABLE, NON_DISTRIBUTED, OptimizerEntries, optimizer_entries
from .optimizer.reading import read_optimizer, repair_optimizer
from .optimizer.state import OptimizerState, repad_state
from .options import ConvertOptions
from .training_state import common_state, random_states, rank_random_states
from .views import View
from .vocabulary import divisor, pad_notes, padded_rows, repad


def lay_out(
    checkpoint: Checkpoint, ready: Prepared, dtypes: Mapping[str, str], options: ConvertOptions, *, weights: bool = True
) -> tuple[TargetLayout, list[Note], dict[str, Any]]:
    """(files and placements, notes, description) of a Megatron run folder with one iteration; `dtypes` names what each tensor becomes.

    weights  False leaves the model's weights and the HF model's files out: they lie beside the iteration.
    """
    view, optimizer = ready.view, ready.optimizer
    if optimizer is not None:
        dtypes = {**dtypes, **optimizer.dtypes}
    layout, iteration = options.layout, target_iteration(checkpoint, options)
    legacy = options.to == "torch"
    beside = [n for n in view.tensors if view.family and is_carried(view.family, n)]
    if legacy and beside and weights:
        raise CkptError(
            "E410",
            "the legacy format has no place for tensors that Megatron's model does not have",
            found=f"{beside[0]} and {len(beside) - 1} more",
            hint="torch_dist keeps them beside the converted ones: --to torch_dist",
        )
    args = {**view.args, "make_vocab_size_divisible_by": divisor(view, options)}
    kinds = {d for n, d in dtypes.items() if not is_optimizer(n) and n not in view.keep_dtype}
    if len(kinds) == 1:
        args["params_dtype"] = kinds.pop()
    form = "torch" if legacy else "torch_dist"
    stored = checkpoint_args(
        args, layout=layout.arguments(), iteration=iteration or 0, ckpt_format=form, weights_only=optimizer is None
    )
    if optimizer is not None:
        stored |= optimizer.arguments
    for name in DTYPE_ATTRIBUTES:
        if isinstance(stored.get(name), str):
            stored[name] = DTypeRef(stored[name])
    spec, experts = layer_spec(checkpoint, view.args, options)
    if legacy:
        stored |= spec_args(spec, experts)
    common: dict[str, Any] = {
        "args": Namespace(stored),
        "checkpoint_version": 3.0,
        "iteration": iteration or 0,
        "num_floating_point_operations_so_far": 0.0,
    }
    kept, dropped = common_state(checkpoint)
    common |= kept
    if optimizer is not None:
        common["optimizer"] = optimizer.common
    folder = "release" if iteration is None else f"iter_{iteration:07d}"
    template = find_template(checkpoint, options)
    made, copies, carried = carried_files(template, folder) if weights and options.max_layers is None else ([], (), [])
    notes = [*template.notes, *carried, *dropped]
    notes += [*pad_notes(view), *_flags(checkpoint, args), *_biased_experts(view, layout)] if weights else []
    details: dict[str, Any] = {"format": options.to, "iteration": "release" if iteration is None else iteration}
    gated, layers = is_gated(args), view.dims.layers
    if legacy:
        random, told = rank_random_states(checkpoint, layout, keep=options.rng)
        notes += [*told, *_lost_optimizer(checkpoint, optimizer)]
        laid = layout_legacy(
            {n: t for n, t in view.tensors.items() if not is_optimizer(n)},
            dtypes,
            common=common,
            iteration=iteration,
            layers=layers,
            layout=layout,
            gated=gated,
            tied=view.dims.tied,
            spec=spec,
            experts=experts,
            copies=copies,
            optimizer=None if optimizer is None else rank_states(view, optimizer, layout, spec, experts, stored),
            states={place: {"rng_state": state} for place, state in random.items()},
        )
        if optimizer is not None:
            notes += optimizer.notes
        details |= {"spec": spec, **({"experts": experts} if expert_count(view.tensors) else {})}
    else:
        stacked = _stacked(view, args, options)
        # Megatron asks for the keys that content_metadata names, stacked unless it says otherwise
        common["content_metadata"] = {"singleton_local_shards": False, **({} if stacked else {"non_homogeneous_layers": True})}
        if optimizer is not None:
            common["content_metadata"] |= optimizer.content
            notes += optimizer.notes
        states, told = random_states(checkpoint, layout, keep=options.rng)
        notes += [*told, *_lost_optimizer(checkpoint, optimizer)]
        laid = layout_torch_dist(
            view.tensors if weights else {n: t for n, t in view.tensors.items() if is_optimizer(n)},
            dtypes,
            common=common,
            iteration=iteration,
            stacked=stacked,
            layers=layers,
            layout=layout,
            gated=gated,
            copies=copies,
            records=states,
            extra_state=weights,
            local_norms=_local_norms(checkpoint, options),
            file_bytes=options.max_shard_size or FILE_BYTES,
        )
        details |= {"layer_keys": "stacked" if stacked else "per-layer"}
    details |= {
        n: v
        for n, v in (("tp", layout.tp), ("pp", layout.pp), ("vpp", layout.vpp), ("ep", layout.ep), ("etp", layout.etp))
        if n in ("tp", "pp") or (v and v > 1)
    }
    details["padded_vocab_size"] = args["padded_vocab_size"]
    return replace(laid, files=(*laid.files[:-1], *made, laid.files[-1])), notes, details


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a Megatron target is made of: the view with its vocabulary padded for the target and its optimizer tensors, and what must be
    stored for these besides tensors (None: no optimizer state)."""

    view: View
    optimizer: OptimizerEntries | None


def prepared(checkpoint: Checkpoint, view: View, options: ConvertOptions) -> Prepared:
    """The view made ready for the target. E410 when optimizer state would be left behind silently, E226 when it cannot be understood."""
    rows = padded_rows(view, options)
    padded = repad(view, rows)
    if options.optimizer == "none" or not has_optimizer(checkpoint):
        return Prepared(padded, None)
    vocab = int(view.args.get("vocab_size") or view.dims.padded_vocab)
    state = repad_state(_sound(read_optimizer(checkpoint, view), checkpoint, view, options), vocab, rows)
    form = options.optimizer
    if form == "keep":
        form = NON_DISTRIBUTED if state.kind in ("float16", "float32", "indexed") else FULLY_RESHARDABLE
    entries = optimizer_entries(state, form, weights=padded.tensors, layout=options.layout)
    entries = replace(entries, notes=(*state.notes, *state.problems, *entries.notes))
    tensors = {**padded.tensors, **entries.tensors}
    return Prepared(replace(padded, tensors=tensors, keep_dtype=padded.keep_dtype | entries.tensors.keys()), entries)


def _sound(state: OptimizerState, checkpoint: Checkpoint, view: View, options: ConvertOptions) -> OptimizerState:
    """The state, put right with --repair when it was saved shifted. E416 when it was and nobody asked for that."""
    if not state.problems or state.kind != "fully_reshardable":
        return state
    if not options.repair:
        problem = state.problems[0]
        raise CkptError(
            "E416",
            "the float32 weights of the optimizer are not the model's weights",
            where=f"{checkpoint.location.directory}: {problem.subject}",
            found=problem.text,
            hint="--repair puts right what megatron-core 0.15 to 0.19 saved shifted; --optimizer none leaves the state behind",
        )
    repaired, done = repair_optimizer(state, checkpoint, view)
    told = f"state of {done.parameters} parameters was saved shifted and is put right; {done.lost} of {done.elements} elements are lost"
    return replace(repaired, notes=(*repaired.notes, Note("warning", "optimizer", told)))


def has_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether a Megatron checkpoint holds optimizer state in any form."""
    if isinstance(checkpoint.details, Legacy):
        return any("optimizer" in r.file.value for r in checkpoint.details.ranks)
    return any(is_optimizer(n) for n in checkpoint.tensors)


def target_iteration(checkpoint: Checkpoint, options: ConvertOptions) -> int | None:
    """Number of the iteration to write; None = `release`."""
    if options.iteration is not None or checkpoint.format == "hf":
        return options.iteration
    return checkpoint.location.iteration


def _local_norms(checkpoint: Checkpoint, options: ConvertOptions) -> bool:
    """Whether the norm before experts is called linear_fc1.layer_norm_weight, as the local spec does in torch_dist: the source's way."""
    if options.spec is not None:
        return options.spec == "local"
    if isinstance(checkpoint.details, Legacy):
        return checkpoint.details.spec == "local"
    return checkpoint.format != "hf" and of_local_spec(checkpoint.tensors)


def _stacked(view: View, args: Mapping[str, Any], options: ConvertOptions) -> bool:
    alike = homogeneous(view.tensors)
    if options.layer_keys == "auto":
        return alike and not _needs_layer_keys(args)
    if options.layer_keys not in ("stacked", "per-layer"):
        raise CkptError("E410", f"there are no layer keys {options.layer_keys!r}", expected="auto, stacked, per-layer")
    if options.layer_keys == "stacked" and not alike:
        raise CkptError(
            "E410", "the layers of this model are not alike, so Megatron cannot store them as one tensor", hint="use --layer-keys per-layer"
        )
    return options.layer_keys == "stacked"


def _needs_layer_keys(args: Mapping[str, Any]) -> bool:
    """Whether Megatron itself would index the layers in the keys (source: transformer_block.py, 0.16)."""
    frequency = args.get("moe_layer_freq", 1)
    return isinstance(frequency, (list, tuple)) or (isinstance(frequency, int) and frequency > 1)


def _lost_optimizer(checkpoint: Checkpoint, optimizer: OptimizerEntries | None) -> list[Note]:
    if optimizer is not None or not has_optimizer(checkpoint):
        return []
    return [Note("dropped", "optimizer", "the optimizer state was left out, as asked")]


def _biased_experts(view: View, layout: ParallelLayout) -> list[Note]:
    biased = next((n for n in view.tensors if expert_of(n) is not None and n.rpartition(".")[2].startswith("bias")), None)
    if biased is None or layout.expert_tp == 1:
        return []
    return [Note("warning", biased, "Megatron-Core builds experts with biases with an expert tensor parallel size of 1 only: give --etp 1")]


def _flags(checkpoint: Checkpoint, args: Mapping[str, Any]) -> list[Note]:
    flags = flags_not_restored(args) if checkpoint.format == "hf" else ()
    said = "pass these to Megatron-LM beside --use-checkpoint-args, which does not set them"
    return [Note("flags", ", ".join(flags), said)] if flags else []
