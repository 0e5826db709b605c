"""What the legacy `torch` format is made of besides weights: the layer spec it is written for, and each rank's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpoint import Checkpoint
from .errors import CkptError
from .formats.torch_legacy import Legacy
from .formats.torch_legacy_writer import RankState
from .layout import ParallelLayout
from .memory.names import Rank
from .model_names import GROUPED, SEQUENTIAL, TE_GROUPED
from .optimizer.entries import OptimizerEntries
from .optimizer.legacy_entries import DISTRIBUTED, INDEXED, rank_optimizer
from .optimizer.order import rank_parameters
from .optimizer.reading import model_of
from .options import ConvertOptions
from .views import View


def layer_spec(checkpoint: Checkpoint, args: Mapping[str, Any], options: ConvertOptions) -> tuple[str, str]:
    """("te" | "local", how experts are stored) of the legacy format: as asked, else as the source, else as Transformer Engine's."""
    source = checkpoint.details if isinstance(checkpoint.details, Legacy) else None
    megatron = checkpoint.format != "hf"
    spec = options.spec or (source.spec if source else "local" if megatron and args.get("transformer_impl") == "local" else "te")
    if spec == "local" and options.to == "torch" and args.get("multi_latent_attention"):
        raise CkptError(
            "E410",
            "no release of megatron-core builds latent attention in its local layer spec",
            expected="--spec te",
            hint="torch_dist can be written for either spec: --to torch_dist",
        )
    if spec not in ("te", "local"):
        raise CkptError("E410", f"there is no layer spec {spec!r}", expected="te, local")
    if options.experts is not None:
        return spec, options.experts
    if source is not None and (options.spec in (None, source.spec)):
        return spec, source.experts
    if source is None and megatron and args.get("moe_grouped_gemm"):
        return spec, GROUPED if spec == "local" or args.get("moe_use_legacy_grouped_gemm") else TE_GROUPED
    return spec, SEQUENTIAL if spec == "local" or (megatron and args.get("moe_grouped_gemm") is False) else TE_GROUPED


def spec_args(spec: str, experts: str) -> dict[str, Any]:
    """The spec under the names of Megatron's arguments."""
    return {
        "transformer_impl": "local" if spec == "local" else "transformer_engine",
        "moe_grouped_gemm": experts != SEQUENTIAL,
        "moe_use_legacy_grouped_gemm": experts == GROUPED,
    }


def rank_states(
    view: View, entries: OptimizerEntries, layout: ParallelLayout, spec: str, experts: str, args: Mapping[str, Any]
) -> RankState:
    """What each rank's file of the legacy format holds of the optimizer."""
    model = model_of(view, layout)
    form = DISTRIBUTED if entries.arguments.get("use_distributed_optimizer") else INDEXED

    def state(tp: int, pp: int, ep: int, etp: int) -> tuple[Any, Any]:
        chunks = rank_parameters(model, Rank(tp, pp, ep, etp), spec, experts)
        made = rank_optimizer(entries, chunks, layout, form, args=args, first_stage=pp == 0)
        return made.optimizer, made.distrib

    return state
