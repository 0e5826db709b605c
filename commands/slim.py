"""ckpt slim: weights that are stored twice are stored once."""

from __future__ import annotations

from typing import Annotated

import typer

from .run_options import BUFFER, FORMAT, FSYNC, ITERATION, JSON, PROGRESS, THREADS

EPILOG = """Examples:

  ckpt slim checkpoint-500                       compare both copies, show what would go and how many bytes

  ckpt slim checkpoint-500 --apply               take Megatron's copy out

  ckpt slim run/ --iteration 2000 --apply        of another iteration"""


def slim(
    source: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or one iteration folder.", show_default=False)],
    iteration: ITERATION = "latest",
    apply: Annotated[bool, typer.Option("--apply", help="Do it; without it everything is compared and nothing changed.")] = False,
    threads: THREADS = 2,
    buffer: BUFFER = "256KiB",
    fsync: FSYNC = True,
    progress: PROGRESS = True,
    format: FORMAT = "auto",
    json: JSON = False,
) -> None:
    """Take the model's weights out of an iteration folder when the same weights lie beside it as safetensors.

    Every value of both copies is compared first; if one differs, nothing is changed. Optimizer, schedule and random states stay
    byte for byte. The new folder is complete before the old one goes, at whatever point the power fails.
    """
    from ..checkpoint import open_checkpoint
    from ..slim import plan_slim
    from ..slim import slim as carry_out
    from .convert_report import report_plan, report_result
    from .output import Output, note, parse_size
    from .progress import progress as show_progress

    output = Output("json" if json else format)
    checkpoint = open_checkpoint(source, iteration)
    plan = plan_slim(checkpoint, buffer=parse_size(buffer), threads=threads)
    if not apply:
        report_plan(output, plan, checkpoint.location.directory, "slim", threads=threads)
        note("both copies are equal; --apply takes Megatron's out")
        return
    with show_progress(plan.moved_bytes, "slimming", progress) as on_progress:
        result = carry_out(checkpoint, plan, threads=threads, fsync=fsync, on_progress=on_progress)
    report_result(output, plan, result, "slim")
