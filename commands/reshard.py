"""ckpt reshard: the same checkpoint for another parallel layout."""

from __future__ import annotations

from typing import Annotated

import typer

from .layout_options import EP, ETP, FIRST, LAST, PIPELINE, PP, TP, VPP

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
    iteration: Annotated[str, typer.Option(help="latest (what the tracker says), a number, or release.")] = "latest",
    optimizer: Annotated[
        str, typer.Option("--optimizer", "--optim-format", help="keep, fully_reshardable, non_distributed, or none.")
    ] = "keep",
    replicas: Annotated[str, typer.Option("--replicas", help="When copies on ranks differ: refuse, or take the first.")] = "refuse",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything back and compare it exactly before the result appears.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
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

    The legacy format gets one file per rank of the new layout. torch_dist is free of TP and PP: any layout could have loaded it
    already; its pieces are cut anew so that each rank reads its own.
    """
    from ..checkpoint import open_checkpoint
    from ..conversion import plan_reshard, run_conversion
    from ..options import ConvertOptions
    from .convert_report import report_plan, report_result
    from .layout_options import layout_of
    from .output import Output, parse_size
    from .progress import progress as show_progress

    output = Output("json" if json else format)
    checkpoint = open_checkpoint(source, iteration)
    layout = layout_of(tp, pp, vpp, ep, etp, first_layers, last_layers, pipeline_layout)
    options = ConvertOptions(to=checkpoint.format, layout=layout, optimizer=optimizer, replicas=replicas, buffer=parse_size(buffer))
    plan = plan_reshard(checkpoint, options)
    if dry_run:
        report_plan(output, plan, target, "reshard")
        return
    with show_progress(plan.moved_bytes, "resharding", progress) as on_progress:
        result = run_conversion(
            plan, checkpoint, target, options, threads=threads, fsync=fsync, overwrite=overwrite, verify=verify, on_progress=on_progress
        )
    report_result(output, plan, result, "reshard")
