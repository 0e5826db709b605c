"""ckpt reshard: the same checkpoint for another parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .layout_options import COUNT_EMBEDDING, COUNT_LOSS, DP, EP, ETP, EXPERTS, FIRST, LAST, PIPELINE, PP, SPEC, TP, VPP

EPILOG = """Examples:

  ckpt reshard run/ out --tp 4 --pp 2                       moments, step counts and schedule come along

  ckpt reshard run/ out --tp 1 --optimizer none             weights alone

  ckpt reshard run/ out --tp 2 --pp 4 --pipeline-layout "Et*3|(t*4|)*2t*3L" --dry-run"""


def reshard(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Run folder or one iteration folder of Megatron.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="DST", help="Folder to make; must not exist or be empty.", show_default=False)],
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
    iteration: Annotated[str, typer.Option(help="latest (what the tracker says), a number, or release.")] = "latest",
    optimizer: Annotated[
        str, typer.Option("--optimizer", "--optim-format", help="keep, fully_reshardable, non_distributed, or none.")
    ] = "keep",
    divisible_by: Annotated[
        int | None,
        typer.Option(
            "--make-vocab-size-divisible-by",
            help="Pad the vocabulary to a multiple of this times TP; default: as the source.",
            show_default=False,
        ),
    ] = None,
    padded_vocab: Annotated[
        int | None, typer.Option("--padded-vocab-size", help="Rows of the padded vocabulary.", show_default=False)
    ] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab-size", help="True vocabulary, when the checkpoint does not tell.", show_default=False)
    ] = None,
    replicas: Annotated[str, typer.Option("--replicas", help="When copies on ranks differ: refuse, or take the first.")] = "refuse",
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
    """Move a Megatron checkpoint to another parallel layout, optimizer state included, in the format it has.

    Sizes that are not given stay as they are. The legacy format gets one file per rank of the new layout. torch_dist is free of
    TP and PP: any layout could have loaded it already; its pieces are cut anew so that each rank reads its own.
    """
    from ..checkpoint import open_checkpoint
    from ..conversion import run_conversion
    from ..options import ConvertOptions
    from ..planning import to_json
    from ..reshard import plan_reshard
    from .convert_report import report_plan, report_result
    from .layout_options import target_layout
    from .output import Output, parse_size
    from .progress import progress as show_progress

    output = Output("json" if json else format)
    checkpoint = open_checkpoint(source, iteration)
    options = ConvertOptions(
        to=checkpoint.format,
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
        divisible_by=divisible_by,
        padded_vocab=padded_vocab,
        vocab=vocab,
        spec=spec,
        experts=experts,
        optimizer=optimizer,
        repair=repair,
        check_crc=check_crc,
        replicas=replicas,
        buffer=parse_size(buffer),
    )
    plan = plan_reshard(checkpoint, options)
    if save_plan:
        save_plan.write_text(to_json(plan))
    if dry_run:
        report_plan(output, plan, target, "reshard")
        return
    with show_progress(plan.moved_bytes, "resharding", progress) as on_progress:
        result = run_conversion(
            plan, checkpoint, target, options, threads=threads, fsync=fsync, overwrite=overwrite, verify=verify, on_progress=on_progress
        )
    report_result(output, plan, result, "reshard")
