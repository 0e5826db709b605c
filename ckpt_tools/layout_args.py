"""The parallel layout of the run that wrote a checkpoint, from its stored arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .formats.pickles import Record
from .layout import ParallelLayout


def positive(args: Mapping[str, Any], name: str) -> int | None:
    """A stored size; None when it is absent or no positive integer."""
    value = args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def source_layout(args: Mapping[str, Any]) -> ParallelLayout:
    """The layout of the run that wrote the checkpoint, from its stored arguments; sizes that are absent count as 1."""
    tp, pp, cp = (positive(args, f"{n}_parallel_size") or 1 for n in ("tensor_model", "pipeline_model", "context"))
    world = positive(args, "world_size")
    dp = positive(args, "data_parallel_size") or (max(1, world // (tp * pp * cp)) if world else 1)
    pipeline = args.get("pipeline_model_parallel_layout")
    if isinstance(pipeline, Record) and isinstance(pipeline.state, dict):
        pipeline = pipeline.state.get("input_data")
    if isinstance(pipeline, list) and all(isinstance(stage, list) for stage in pipeline):
        letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
        pipeline = "|".join("".join(letters.get(str(part).lower(), "?") for part in stage) for stage in pipeline)
    vpp = (positive(args, "virtual_pipeline_model_parallel_size") or 1) if pp > 1 else 1
    if not isinstance(pipeline, str):
        pipeline = None
    return ParallelLayout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=positive(args, "expert_model_parallel_size") or 1,
        etp=positive(args, "expert_tensor_parallel_size") or tp,
        cp=cp,
        dp=dp,
        first_layers=positive(args, "decoder_first_pipeline_num_layers"),
        last_layers=positive(args, "decoder_last_pipeline_num_layers"),
        pipeline=pipeline,
        count_embedding=args.get("account_for_embedding_in_pipeline_split") is True,
        count_loss=args.get("account_for_loss_in_pipeline_split") is True,
    )
