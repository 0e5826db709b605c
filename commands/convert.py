"""ckpt convert: between Hugging Face safetensors and Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .layout_options import COUNT_EMBEDDING, COUNT_LOSS, DP, EP, ETP, EXPERTS, FIRST, LAST, PIPELINE, PP, SPEC, TP, VPP

EPILOG = """Examples:

  ckpt convert meta-llama/ run --to torch_dist               HF folder -> Megatron run folder, any TP/PP can load it

  ckpt convert run/ out --to hf --iteration 2000              a training run's iteration 2000 -> HF

  ckpt convert run/ out --to hf --hf-config base/ --dry-run   show what would be done"""


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Run folder, one iteration folder, HF folder or .safetensors file.", show_default=False)
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="Folder to make; must not exist or be empty.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="Format to write: hf, torch_dist or torch (legacy).", show_default=False)],
    iteration: Annotated[str, typer.Option(help="latest (what the tracker says), a number, or release.")] = "latest",
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="HF folder whose config, tokenizer and shard layout to follow.", show_default=False),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Model family, when config or arguments do not tell.", show_default=False)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating tensors to this dtype; default: keep each tensor's own.", show_default=False)
    ] = None,
    max_shard_size: Annotated[str | None, typer.Option("--max-shard-size", help="Largest file, such as 5GB.", show_default=False)] = None,
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
    replicas: Annotated[str, typer.Option("--replicas", help="When copies on ranks differ: refuse, or take the first.")] = "refuse",
    optimizer: Annotated[str, typer.Option("--optimizer", help="keep, or none to leave optimizer state behind.")] = "keep",
    divisible_by: Annotated[
        int | None,
        typer.Option(
            "--make-vocab-size-divisible-by", help="Pad the vocabulary to a multiple of this times TP; default 128.", show_default=False
        ),
    ] = None,
    padded_vocab: Annotated[
        int | None, typer.Option("--padded-vocab-size", help="Rows of the padded vocabulary.", show_default=False)
    ] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab-size", help="True vocabulary, when the checkpoint does not tell.", show_default=False)
    ] = None,
    weights_from: Annotated[
        str, typer.Option("--weights-from", help="Which copy counts when weights are stored twice: auto, safetensors, megatron.")
    ] = "auto",
    strip_remote_code: Annotated[bool, typer.Option("--strip-remote-code", help="Leave out *.py files and auto_map.")] = False,
    force: Annotated[
        bool, typer.Option("--allow-unrepresentable", help="Convert weights although Megatron cannot hold part of the config.")
    ] = False,
    check_crc: Annotated[bool, typer.Option("--check-crc", help="First check the checksums stored in the source.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Put optimizer state right that megatron-core 0.15 to 0.19 saved shifted.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything back and compare it exactly before the result appears.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    save_plan: Annotated[Path | None, typer.Option("--save-plan", help="Write the plan as JSON to this file.", show_default=False)] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST, which stays as it is until the new one is complete.")
    ] = False,
    threads: Annotated[int, typer.Option(help="Worker threads.")] = 2,
    buffer: Annotated[str, typer.Option(help="Buffer per thread.")] = "256KiB",
    fsync: Annotated[bool, typer.Option("--fsync/--no-fsync", help="Flush to disk before the result appears.")] = True,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress on a terminal.")] = True,
    format: Annotated[str, typer.Option("--format", help="auto, table, tsv, json or md.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Convert a checkpoint between Hugging Face and Megatron-Core, without loading the model.

    Bytes move from file to file through small buffers: no GPU, no torch, memory that does not grow with the model.
    DST appears only when it is complete. Every cast, padding, cut and dropped tensor is listed.
    """
    from ..checkpoint import open_checkpoint
    from ..conversion import plan_conversion, run_conversion
    from ..options import ConvertOptions
    from ..planning import to_json
    from .convert_report import report_plan, report_result
    from .layout_options import target_layout
    from .output import Output, parse_size
    from .progress import progress as show_progress

    output = Output("json" if json else format)
    checkpoint = open_checkpoint(source, iteration)
    options = ConvertOptions(
        to=to,
        family=family,
        hf_config=str(hf_config) if hf_config else None,
        dtype=dtype,
        layer_keys=layer_keys,
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
        replicas=replicas,
        optimizer=optimizer,
        repair=repair,
        check_crc=check_crc,
        weights_from=weights_from,
        strip_remote_code=strip_remote_code,
        allow_unrepresentable=force,
        buffer=parse_size(buffer),
    )
    plan = plan_conversion(checkpoint, options)
    if save_plan:
        save_plan.write_text(to_json(plan))
    if dry_run:
        report_plan(output, plan, target)
        return
    with show_progress(plan.moved_bytes, "converting", progress) as on_progress:
        result = run_conversion(
            plan, checkpoint, target, options, threads=threads, fsync=fsync, overwrite=overwrite, verify=verify, on_progress=on_progress
        )
    report_result(output, plan, result)
