"""The same Megatron checkpoint for another parallel layout, in the format it has."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from .checkpoint import Checkpoint
from .conversion import plan_conversion
from .errors import CkptError
from .formats.torch_legacy import Legacy
from .layout import ParallelLayout
from .layout_args import source_layout
from .notes import Note
from .options import ConvertOptions
from .planning import Plan


@dataclass(frozen=True, slots=True)
class LayoutChanges:
    """What a person says about the target's layout: fields of ParallelLayout, None = as the source has it."""

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    cp: int | None = None
    dp: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    pipeline: str | None = None
    count_embedding: bool | None = None
    count_loss: bool | None = None


# How layers are spread makes sense as a whole: another size of one of these means that the source's others do not count.
_SPREAD = ("pp", "vpp", "first_layers", "last_layers", "pipeline", "count_embedding", "count_loss")


def plan_reshard(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    """The plan that moves a Megatron checkpoint to options.layout in its own format. E410 for a format without ranks."""
    if checkpoint.format not in ("torch_dist", "torch"):
        raise CkptError(
            "E410",
            f"the format {checkpoint.format!r} knows no parallel layout",
            where=checkpoint.location.directory,
            expected="torch_dist, torch",
            hint="`ckpt convert` makes a Megatron checkpoint of it",
        )
    made = plan_conversion(checkpoint, replace(options, to=checkpoint.format))
    if checkpoint.format == "torch_dist":
        told = Note(
            "kept",
            "",
            "torch_dist belongs to no layout: any TP and PP could have loaded the source; the pieces are cut to suit the new ranks",
        )
        made = replace(made, notes=(told, *made.notes))
    return made


def layout_of(checkpoint: Checkpoint) -> ParallelLayout:
    """The layout of the run that wrote a Megatron checkpoint; one rank for an HF folder."""
    if isinstance(checkpoint.details, Legacy) and not checkpoint.args:
        legacy = checkpoint.details
        return ParallelLayout(tp=legacy.tp, pp=legacy.pp, vpp=legacy.vpp, ep=legacy.ep)
    return source_layout(checkpoint.args or {})


def changed_layout(source: ParallelLayout, changes: LayoutChanges) -> ParallelLayout:
    """The target's layout: what `changes` name, the rest as in `source` where it still makes sense.

    A change of the pipeline forgets how the source spread its layers, unless the new sizes say it too. Experts are cut as the rest is
    where they were in the source. E401 for sizes that exclude each other.
    """
    given: dict[str, Any] = {f.name: v for f in fields(changes) if (v := getattr(changes, f.name)) is not None}
    kept = {f.name: getattr(source, f.name) for f in fields(source)}
    if source.expert_tp == source.tp:
        kept["etp"] = None
    if any(name in given and given[name] != kept[name] for name in _SPREAD):
        kept |= {f.name: f.default for f in fields(source) if f.name in _SPREAD and f.name != "pp"}
    return ParallelLayout(**{**kept, **given})
