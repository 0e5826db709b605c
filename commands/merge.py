"""ckpt merge: a LoRA adapter becomes part of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .run_options import BUFFER, DRY_RUN, FORMAT, FSYNC, ITERATION, JSON, LORA_ALPHA, OVERWRITE, PROGRESS, THREADS

EPILOG = """Examples:

  ckpt merge llama/ adapter/ merged/                          base + alpha / r * B A, in the dtype of the base

  ckpt merge run/ adapter/ merged/ --hf-config llama/         the base is a Megatron run; the result is HF

  ckpt merge llama/ adapter/ merged/ --dry-run                which tensors change, which are copied"""


def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="HF folder or Megatron run the adapter was trained for.", show_default=False)],
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="PEFT adapter folder, or a Megatron run that holds an adapter.", show_default=False)
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="HF folder to make; must not exist or be empty.", show_default=False)],
    iteration: ITERATION = "latest",
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="HF folder whose config and tokenizer to follow, for a Megatron base.", show_default=False),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Model family of a Megatron base, when it cannot be told.", show_default=False)] = None,
    max_shard_size: Annotated[str | None, typer.Option("--max-shard-size", help="Largest file, such as 5GB.", show_default=False)] = None,
    lora_alpha: LORA_ALPHA = None,
    untie: Annotated[bool, typer.Option("--untie", help="Store tied embeddings apart when the adapter changes one of them.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Merge although the record says that this adapter is merged.")] = False,
    dry_run: DRY_RUN = False,
    overwrite: OVERWRITE = False,
    threads: THREADS = 2,
    buffer: BUFFER = "256KiB",
    fsync: FSYNC = True,
    progress: PROGRESS = True,
    format: FORMAT = "auto",
    json: JSON = False,
) -> None:
    """Add a LoRA adapter to the weights it was trained for, without torch and without loading the model.

    Products and sums are computed in float32 and rounded once to the dtype of the base. DST records what was merged, so that the same
    adapter is not added twice.
    """
    from ..adapters.merge import merge as carry_out
    from ..adapters.merge_plan import open_both, plan_merge
    from ..options import ConvertOptions
    from .convert_report import report_plan, report_result
    from .output import Output, parse_size
    from .progress import progress as show_progress

    output = Output("json" if json else format)
    options = ConvertOptions(
        to="hf",
        family=family,
        hf_config=str(hf_config) if hf_config else None,
        max_shard_size=parse_size(max_shard_size) if max_shard_size else None,
        lora_alpha=lora_alpha,
        buffer=parse_size(buffer),
    )
    made = plan_merge(*open_both(base, adapter, iteration, options), options=options, untie=untie, again=again)
    if dry_run:
        report_plan(output, made.plan, target, "merge", threads=threads)
        return
    with show_progress(made.nbytes, "merging", progress) as on_progress:
        result = carry_out(made, target, threads=threads, fsync=fsync, overwrite=overwrite, on_progress=on_progress)
    report_result(output, made.plan, result, "merge")
