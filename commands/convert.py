"""ckpt convert: between Hugging Face safetensors and Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .layout_options import COUNT_EMBEDDING, COUNT_LOSS, DP, EP, ETP, EXPERTS, FIRST, LAST, PIPELINE, PP, SPEC, TP, VPP
from .run_options import (
    ADAPTER,
    BUFFER,
    CHECK_CRC,
    DIVISIBLE_BY,
    DRY_RUN,
    FORMAT,
    FSYNC,
    ITERATION,
    JSON,
    LORA_ALPHA,
    NO_OPTIM,
    NO_RNG,
    OVERWRITE,
    PADDED_VOCAB,
    PROGRESS,
    REPAIR,
    REPLICAS,
    RESUME,
    SAVE_PLAN,
    THREADS,
    VERIFY,
    VOCAB,
)

EPILOG = """Examples:

  ckpt convert meta-llama/ run --to torch_dist               HF folder -> Megatron run folder, any TP/PP can load it

  ckpt convert run/ out --to hf --iteration 2000              a training run's iteration 2000 -> HF

  ckpt convert run/ out --to hf --quantize fp8-block          linear layers as float8 with block scales, as DeepSeek's files

  ckpt convert run/ out --to hf --hf-config base/ --dry-run   show what would be done"""


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Run folder, one iteration folder, HF folder or .safetensors file.", show_default=False)
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="Folder to make; must not exist or be empty.", show_default=False)],
    to: Annotated[
        str, typer.Option("--to", help="Format to write: hf, torch_dist, torch (legacy), split; of an adapter: peft.", show_default=False)
    ],
    iteration: ITERATION = "latest",
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="HF folder whose config, tokenizer and shard layout to follow.", show_default=False),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Model family, when config or arguments do not tell.", show_default=False)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating tensors to this dtype; default: keep each tensor's own.", show_default=False)
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="fp8-block: linear layers of an HF target as float8 with a scale per 128 x 128.", show_default=False),
    ] = None,
    max_shard_size: Annotated[str | None, typer.Option("--max-shard-size", help="Largest file, such as 5GB.", show_default=False)] = None,
    moe_layout: Annotated[
        str | None,
        typer.Option("--moe-layout", help="Experts of an HF target: per-expert as on the hub, or fused.", show_default=False),
    ] = None,
    max_layers: Annotated[
        int | None, typer.Option("--max-layers", help="Only the first layers of the model (torch_dist).", show_default=False)
    ] = None,
    layer_keys: Annotated[
        str, typer.Option("--layer-keys", help="torch_dist keys: stacked, per-layer, or auto (as Megatron would).")
    ] = "auto",
    as_iteration: Annotated[int | None, typer.Option("--as-iteration", help="Write iter_N instead of release.", show_default=False)] = None,
    tp: TP = None,
    pp: PP = None,
    vpp: VPP = None,
    ep: EP = None,
    etp: ETP = None,
    first_layers: FIRST = None,
    last_layers: LAST = None,
    pipeline_layout: PIPELINE = None,
    count_embedding: COUNT_EMBEDDING = None,
    count_loss: COUNT_LOSS = None,
    dp: DP = None,
    spec: SPEC = None,
    experts: EXPERTS = None,
    replicas: REPLICAS = "refuse",
    optimizer: Annotated[str, typer.Option("--optimizer", help="keep, or none to leave optimizer state behind.")] = "keep",
    lora_alpha: LORA_ALPHA = None,
    adapter: ADAPTER = False,
    no_optim: NO_OPTIM = False,
    no_rng: NO_RNG = False,
    divisible_by: DIVISIBLE_BY = None,
    padded_vocab: PADDED_VOCAB = None,
    vocab: VOCAB = None,
    weights_from: Annotated[
        str, typer.Option("--weights-from", help="Which copy counts when weights are stored twice: auto, safetensors, megatron.")
    ] = "auto",
    strip_remote_code: Annotated[bool, typer.Option("--strip-remote-code", help="Leave out *.py files and auto_map.")] = False,
    force: Annotated[
        bool, typer.Option("--allow-unrepresentable", help="Convert weights although Megatron cannot hold part of the config.")
    ] = False,
    check_crc: CHECK_CRC = False,
    repair: REPAIR = False,
    verify: VERIFY = False,
    dry_run: DRY_RUN = False,
    save_plan: SAVE_PLAN = None,
    overwrite: OVERWRITE = False,
    resume: RESUME = False,
    threads: THREADS = 2,
    buffer: BUFFER = "256KiB",
    fsync: FSYNC = True,
    progress: PROGRESS = True,
    format: FORMAT = "auto",
    json: JSON = False,
) -> None:
    """Convert a checkpoint between Hugging Face and Megatron-Core, without loading the model.

    Bytes move from file to file through small buffers: no GPU, no torch, memory that does not grow with the model.
    DST appears only when it is complete. Every cast, padding, cut and dropped tensor is listed.
    """
    from ..checkpoint import open_checkpoint
    from ..conversion import plan_conversion
    from ..options import ConvertOptions
    from .layout_options import target_layout
    from .output import Output, parse_size
    from .run_options import Running, carry_out

    output = Output("json" if json else format)
    checkpoint = open_checkpoint(source, iteration)
    options = ConvertOptions(
        to=to,
        family=family,
        hf_config=str(hf_config) if hf_config else None,
        dtype=dtype,
        quantize=quantize,
        layer_keys=layer_keys,
        max_layers=max_layers,
        layout=target_layout(
            checkpoint,
            tp=tp,
            pp=pp,
            vpp=vpp,
            ep=ep,
            etp=etp,
            dp=dp,
            first_layers=first_layers,
            last_layers=last_layers,
            pipeline=pipeline_layout,
            count_embedding=count_embedding,
            count_loss=count_loss,
        ),
        iteration=as_iteration,
        max_shard_size=parse_size(max_shard_size) if max_shard_size else None,
        divisible_by=divisible_by,
        padded_vocab=padded_vocab,
        vocab=vocab,
        spec=spec,
        experts=experts,
        moe_layout=moe_layout,
        replicas=replicas,
        optimizer="none" if no_optim else optimizer,
        rng=not no_rng,
        adapter=adapter,
        lora_alpha=lora_alpha,
        repair=repair,
        check_crc=check_crc,
        weights_from=weights_from,
        strip_remote_code=strip_remote_code,
        allow_unrepresentable=force,
        buffer=parse_size(buffer),
    )
    plan = plan_conversion(checkpoint, options)
    running = Running(verify, dry_run, save_plan, overwrite, resume, threads, fsync, progress)
    carry_out(output, plan, checkpoint, target, options, running, "convert")
