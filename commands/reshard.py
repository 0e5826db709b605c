"""ckpt reshard: the same checkpoint for another parallel layout."""

from __future__ import annotations

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
    iteration: ITERATION = "latest",
    optimizer: Annotated[
        str, typer.Option("--optimizer", "--optim-format", help="keep, fully_reshardable, non_distributed, or none.")
    ] = "keep",
    adapter: ADAPTER = False,
    no_optim: NO_OPTIM = False,
    no_rng: NO_RNG = False,
    divisible_by: DIVISIBLE_BY = None,
    padded_vocab: PADDED_VOCAB = None,
    vocab: VOCAB = None,
    replicas: REPLICAS = "refuse",
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
    """Move a Megatron checkpoint to another parallel layout, optimizer state included, in the format it has.

    Sizes that are not given stay as they are. The legacy format gets one file per rank of the new layout. torch_dist is free of
    TP and PP: any layout could have loaded it already; its pieces are cut anew so that each rank reads its own.
    """
    from ..checkpoint import open_checkpoint
    from ..options import ConvertOptions
    from ..reshard import plan_reshard
    from .layout_options import target_layout
    from .output import Output, parse_size
    from .run_options import Running, carry_out

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
        optimizer="none" if no_optim else optimizer,
        rng=not no_rng,
        adapter=adapter,
        repair=repair,
        check_crc=check_crc,
        replicas=replicas,
        buffer=parse_size(buffer),
    )
    plan = plan_reshard(checkpoint, options)
    running = Running(verify, dry_run, save_plan, overwrite, resume, threads, fsync, progress)
    carry_out(output, plan, checkpoint, target, options, running, "reshard")
