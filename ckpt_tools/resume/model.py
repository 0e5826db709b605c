"""What an experiment begins with: a model of random weights, or the state in someone's checkpoint, made loadable."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from glob import escape as glob_escape
from glob import glob
from pathlib import Path
from typing import Any

from ..checkpoint import open_checkpoint
from ..conversion import choose_weights, plan_conversion, run_conversion
from ..errors import CkptError
from ..families import family_of_config
from ..families.config import args_from_config
from ..families.dimensions import Dimensions, dimensions
from ..families.megatron_args import checkpoint_args
from ..layer_cut import cut_arguments
from ..layout import ParallelLayout
from ..optimizer.kinds import optimizer_state
from ..options import ConvertOptions
from ..views import as_mcore
from .completeness import ALL, judge
from .result import Reason
from .route import layout_after
from .settings import ALPHA, RANK, Settings

DROPOUT = 0.1
_DISTRIBUTED = (
    "fully_reshardable",
    "fully_sharded_model_space",
    "dp_reshardable",
    "fully_sharded_bucket_space",
    "dp_zero_gather_scatter",
    "distrib_optim",
)


@dataclass(frozen=True, slots=True)
class Beginning:
    """model: in words;   args: Megatron's arguments of the model, without a layout;   load: iteration folder to load first, or None;
    iteration: where that is;   layout of the first processes;   optimizer "distributed" or "plain";   length: tokens of a sequence;
    dims: the model's sizes;   family: its name, where known;   missing, reasons: what is wrong with the checkpoint;   notes: what a person
    must know."""

    model: str
    args: dict[str, Any]
    load: Path | None
    iteration: int
    layout: ParallelLayout
    optimizer: str
    length: int
    dims: Dimensions | None
    family: str | None = None
    missing: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    lora: bool = False

    @property
    def rows(self) -> int:
        """Rows of the padded vocabulary, the same in every layout of the experiment."""
        return int(self.args["padded_vocab_size"])

    def arguments(self, layout: ParallelLayout) -> dict[str, Any]:
        """All arguments that a run of this model at a layout has and stores."""
        stored = checkpoint_args(self.args, layout=layout.arguments(), iteration=self.iteration, weights_only=False)
        adapter = {"lora_rank": RANK, "lora_alpha": ALPHA} if self.lora else {}
        return {**stored, **adapter, "use_distributed_optimizer": self.optimizer == "distributed"}


def beginning(settings: Settings, folder: Path) -> Beginning:
    """What the settings ask to begin with. Errors: E516 for a model that the trainer cannot run, those of reading a checkpoint."""
    made = _from_config(settings) if settings.run is None else _from_run(settings, folder)
    if made.missing:
        return made
    _check(made, settings)
    return made


def _from_config(settings: Settings) -> Beginning:
    config = dict(settings.config)
    family = family_of_config(config, "--config")
    args, _ = args_from_config(config, family.rules)
    args["padded_vocab_size"] = _padded(args["vocab_size"], settings)
    args["params_dtype"] = settings.dtype or args.get("params_dtype") or "bfloat16"
    changed = layout_after(settings.via, settings.layout) != settings.layout
    dropout = settings.dropout if settings.dropout is not None else 0.0 if changed else DROPOUT
    args |= {"attention_dropout": dropout, "hidden_dropout": dropout}
    layers = settings.max_layers
    args = args if layers is None else cut_arguments(args, layers)
    notes = (f"dropout is {dropout:g}",) if dropout else ("no dropout: its masks belong to a layout, which changes",) if changed else ()
    return Beginning(
        f"{family.name}, {args['num_layers']} layers, hidden size {args['hidden_size']}, {args['params_dtype']}",
        args,
        None,
        0,
        settings.layout,
        settings.optimizer or "distributed",
        min(settings.length, args["max_position_embeddings"]),
        dimensions(args),
        family.name,
        notes=notes,
        lora=settings.lora,
    )


def _padded(rows: int, settings: Settings) -> int:
    """Rows that every tensor-parallel size of the experiment divides."""
    step = math.lcm(settings.layout.tp, layout_after(settings.via, settings.layout).tp)
    return -(-rows // step) * step


def _from_run(settings: Settings, folder: Path) -> Beginning:
    path = settings.run or ""
    try:
        checkpoint = open_checkpoint(path, settings.iteration)
    except CkptError as error:
        if error.code in ("E101", "E103") and glob(os.path.join(glob_escape(path), "*.safetensors")):
            return _weights_only(settings, path, error)
        raise
    place = checkpoint.location
    whole = judge(path, settings.iteration, family=settings.family)
    iteration = place.iteration or 0
    if whole.missing:
        return Beginning(
            place.directory, {}, None, iteration, settings.layout, "distributed", settings.length, None, None, whole.missing, whole.reasons
        )
    options = ConvertOptions(to="torch_dist", family=settings.family, layout=settings.layout, max_layers=settings.max_layers)
    joined, _ = choose_weights(checkpoint, options)
    view = as_mcore(joined, family=settings.family)
    args = dict(view.args)
    args["padded_vocab_size"] = _padded(args["padded_vocab_size"], settings)
    options = replace(options, padded_vocab=args["padded_vocab_size"])
    if settings.max_layers is not None:
        args = cut_arguments(args, settings.max_layers)
    args["params_dtype"] = settings.dtype or _dtype_of(view.tensors.values())
    if settings.dropout is not None:
        args |= {"attention_dropout": settings.dropout, "hidden_dropout": settings.dropout}
    kind = optimizer_state(checkpoint).kind
    prepared = folder / "beginning"
    plan = plan_conversion(checkpoint, options)
    lost = [note.text for note in plan.notes if note.kind == "dropped" and note.subject == "optimizer"]
    if lost:
        raise CkptError(
            "E516",
            "the optimizer's state is there, but ckpt cannot make it loadable at this layout",
            where=place.directory,
            found=lost[0],
            hint="safetensors beside rank files of the legacy format cannot be joined yet",
        )
    run_conversion(plan, checkpoint, str(prepared), options, fsync=False)
    notes = [f"{note.subject}: {note.text}" for note in plan.notes if note.kind in ("dropped", "cut", "warning") and note.subject]
    name = view.family.name if view.family else "a model of no known family"
    return Beginning(
        f"{name}, {args['num_layers']} layers, hidden size {args['hidden_size']}, {args['params_dtype']}",
        args,
        prepared / f"iter_{iteration:07d}",
        iteration,
        settings.layout,
        settings.optimizer or ("distributed" if kind in _DISTRIBUTED else "plain"),
        min(settings.length, args.get("max_position_embeddings") or settings.length),
        dimensions(args),
        view.family.name if view.family else settings.family,
        reasons=whole.reasons,
        notes=tuple(notes),
    )


def _weights_only(settings: Settings, path: str, error: CkptError) -> Beginning:
    """Safetensors beside a tracker whose iteration is not there: weights were exported and the training state was not saved."""
    note = f"{error.what}: only safetensors are here"
    return Beginning(
        path, {}, None, 0, settings.layout, "distributed", settings.length, None, None, ALL, (), (note,)
    )


def _dtype_of(tensors: Any) -> str:
    kinds = [t.dtype for t in tensors if t.dtype in ("bfloat16", "float32", "float16")]
    return max(set(kinds), key=kinds.count) if kinds else "bfloat16"


def _check(made: Beginning, settings: Settings) -> None:
    """CkptError E516 for what this trainer cannot run, before anything is started."""
    args = made.args
    dtype = args.get("params_dtype")
    if dtype not in ("bfloat16", "float32"):
        raise CkptError("E516", f"the trainer computes in bfloat16 or float32, not {dtype}", hint="--dtype bfloat16")
    if args.get("layernorm_zero_centered_gamma") and settings.spec != "te":
        raise CkptError(
            "E516",
            "this model's norms store gamma - 1, which only Transformer Engine computes",
            hint="--spec te, on a machine with Transformer Engine",
        )
    for layout in (settings.layout, layout_after(settings.via, settings.layout)):
        replicas = layout.arguments()["data_parallel_size"]
        if settings.sequences % replicas:
            raise CkptError(
                "E511",
                "the sequences of a step do not divide among the data-parallel ranks",
                expected=f"a multiple of {replicas}",
                found=str(settings.sequences),
            )
    for name, size in (("num_attention_heads", settings.layout.tp), ("padded_vocab_size", settings.layout.tp)):
        if int(args.get(name) or 0) % size:
            what = f"{name} does not divide by the tensor-parallel size"
            raise CkptError("E516", what, expected=f"a multiple of {size}", found=str(args[name]))


