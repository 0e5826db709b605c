"""Planning what Megatron reads: torch_dist and the legacy `torch` format, from any view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .checkpoint import Checkpoint, is_optimizer
from .errors import CkptError
from .families.megatron_args import DTYPE_ATTRIBUTES, checkpoint_args
from .formats.hf_writer import TargetLayout
from .formats.pickles import DTypeRef, Namespace
from .formats.torch_dist_writer import FILE_BYTES, layout_torch_dist
from .formats.torch_legacy import Legacy
from .formats.torch_legacy_writer import layout_legacy
from .hf_template import carried_files, find_template
from .naming import homogeneous
from .notes import Note
from .options import ConvertOptions
from .views import View
from .vocabulary import divisor, pad_notes, padded_rows, repad

KEPT = ("opt_param_scheduler", "num_floating_point_operations_so_far")  # training state that any layout can use


def lay_out(
    checkpoint: Checkpoint, view: View, dtypes: Mapping[str, str], options: ConvertOptions
) -> tuple[TargetLayout, list[Note], dict[str, Any]]:
    """(files and placements, notes, description) of a Megatron run folder with one iteration. `view` must be padded (see `prepared`)."""
    layout, iteration = options.layout, target_iteration(checkpoint, options)
    legacy = options.to == "torch"
    args = {**view.args, "make_vocab_size_divisible_by": divisor(view, options)}
    if len(set(dtypes.values())) == 1:
        args["params_dtype"] = next(iter(dtypes.values()))
    stored = checkpoint_args(args, layout=layout.arguments(), iteration=iteration or 0, ckpt_format=options.to)
    for name in DTYPE_ATTRIBUTES:
        if isinstance(stored.get(name), str):
            stored[name] = DTypeRef(stored[name])
    common: dict[str, Any] = {
        "args": Namespace(stored),
        "checkpoint_version": 3.0,
        "iteration": iteration or 0,
        "num_floating_point_operations_so_far": 0.0,
    }
    source = checkpoint.common or {}
    common |= {k: source[k] for k in KEPT if k in source}
    folder = "release" if iteration is None else f"iter_{iteration:07d}"
    template = find_template(checkpoint, options)
    made, copies, carried = carried_files(template, folder)
    notes = [*template.notes, *carried, *pad_notes(view), *_lost_state(checkpoint)]
    details: dict[str, Any] = {"format": options.to, "iteration": "release" if iteration is None else iteration}
    gated, layers = bool(args.get("swiglu", True)), view.dims.layers
    if legacy:
        spec = options.spec or (checkpoint.details.spec if isinstance(checkpoint.details, Legacy) else "te")
        if spec not in ("te", "local"):
            raise CkptError("E410", f"there is no layer spec {spec!r}", expected="te, local")
        laid = layout_legacy(
            view.tensors,
            dtypes,
            common=common,
            iteration=iteration,
            layers=layers,
            layout=layout,
            gated=gated,
            tied=view.dims.tied,
            spec=spec,
            copies=copies,
        )
        details |= {"spec": spec}
    else:
        stacked = _stacked(view, args, options)
        # Megatron asks for the keys that content_metadata names, stacked unless it says otherwise
        common["content_metadata"] = {"singleton_local_shards": False, **({} if stacked else {"non_homogeneous_layers": True})}
        laid = layout_torch_dist(
            view.tensors,
            dtypes,
            common=common,
            iteration=iteration,
            stacked=stacked,
            layers=layers,
            layout=layout,
            gated=gated,
            copies=copies,
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


def prepared(checkpoint: Checkpoint, view: View, options: ConvertOptions) -> View:
    """The view with its vocabulary padded for the target. E410 when training state would be left behind without a word."""
    if options.optimizer != "none" and has_optimizer(checkpoint):
        raise CkptError(
            "E410",
            "this would leave the optimizer state behind",
            where=checkpoint.location.directory,
            hint="--optimizer none drops it on purpose",
        )
    return repad(view, padded_rows(view, options))


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


def _lost_state(checkpoint: Checkpoint) -> list[Note]:
    notes = []
    if has_optimizer(checkpoint):
        notes.append(Note("dropped", "optimizer", "the optimizer state was left out, as asked"))
    random = any(o.key == "rng_state" for o in checkpoint.objects.values()) or "rng_state" in (checkpoint.common or {})
    if random:
        notes.append(Note("dropped", "rng_state", "random states belong to the ranks of the old layout; Megatron seeds new ones"))
    others = sorted(set(checkpoint.common or {}) & {"rerun_state_machine"})
    notes.extend(Note("dropped", name, "belongs to the ranks of the old layout") for name in others)
    return notes
