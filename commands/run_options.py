"""The options that say how a conversion is carried out, as every command that writes a checkpoint takes them, and carrying it out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..options import ConvertOptions
    from ..planning import Plan
    from .output import Output

PANEL = "Running"
VOCABULARY = "Vocabulary"
ITERATION = Annotated[str, typer.Option(help="latest (what the tracker says), a number, or release.")]
DIVISIBLE_BY = Annotated[
    int | None,
    typer.Option(
        "--make-vocab-size-divisible-by",
        help="Pad the vocabulary to a multiple of this times TP; default: as the source, else 128.",
        show_default=False,
        rich_help_panel=VOCABULARY,
    ),
]
PADDED_VOCAB = Annotated[
    int | None,
    typer.Option("--padded-vocab-size", help="Rows of the padded vocabulary.", show_default=False, rich_help_panel=VOCABULARY),
]
VOCAB = Annotated[
    int | None,
    typer.Option(
        "--vocab-size", help="True vocabulary, when the checkpoint does not tell.", show_default=False, rich_help_panel=VOCABULARY
    ),
]
REPLICAS = Annotated[str, typer.Option("--replicas", help="When copies on ranks differ: refuse, or take the first.")]
CHECK_CRC = Annotated[bool, typer.Option("--check-crc", help="First check the checksums stored in the source.")]
ADAPTER = Annotated[bool, typer.Option("--adapter", help="Take a PEFT adapter that lies beside the weights along.")]
LORA_ALPHA = Annotated[
    float | None, typer.Option("--lora-alpha", help="alpha of a Megatron adapter, when its checkpoint does not tell.", show_default=False)
]
NO_OPTIM = Annotated[bool, typer.Option("--no-optim", help="Leave optimizer state behind, as Megatron's --no-load-optim.")]
NO_RNG = Annotated[bool, typer.Option("--no-rng", help="Leave random states behind, as Megatron's --no-load-rng.")]
REPAIR = Annotated[bool, typer.Option("--repair", help="Put optimizer state right that megatron-core 0.15 to 0.19 saved shifted.")]
VERIFY = Annotated[
    bool,
    typer.Option("--verify", help="Read everything back and compare it exactly before the result appears.", rich_help_panel=PANEL),
]
DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Only show the plan.", rich_help_panel=PANEL)]
SAVE_PLAN = Annotated[
    Path | None, typer.Option("--save-plan", help="Write the plan as JSON to this file.", show_default=False, rich_help_panel=PANEL)
]
OVERWRITE = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace DST, which stays as it is until the new one is complete.", rich_help_panel=PANEL),
]
RESUME = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on where an earlier run of the same command was killed; keep what is written when interrupted.",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
THREADS = Annotated[int, typer.Option(help="Worker threads.", rich_help_panel=PANEL)]
BUFFER = Annotated[str, typer.Option(help="Buffer per thread.", rich_help_panel=PANEL)]
FSYNC = Annotated[bool, typer.Option("--fsync/--no-fsync", help="Flush to disk before the result appears.", rich_help_panel=PANEL)]
PROGRESS = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress on a terminal.", rich_help_panel=PANEL)]
FORMAT = Annotated[str, typer.Option("--format", help="auto, table, tsv, json or md.", rich_help_panel=PANEL)]
JSON = Annotated[bool, typer.Option("--json", help="Same as --format json.", rich_help_panel=PANEL)]


@dataclass(frozen=True, slots=True)
class Running:
    """The values of the options of this file that concern carrying out a plan."""

    verify: bool
    dry_run: bool
    save_plan: Path | None
    overwrite: bool
    resume: bool
    threads: int
    fsync: bool
    progress: bool


def carry_out(
    output: Output, plan: Plan, checkpoint: Checkpoint, target: str, options: ConvertOptions, running: Running, command: str
) -> None:
    """Save the plan where asked; show it with --dry-run, else execute it with progress and report what was done."""
    from ..conversion import run_conversion
    from ..planning import to_json
    from .convert_report import report_plan, report_result
    from .progress import progress as show_progress

    if running.save_plan:
        running.save_plan.write_text(to_json(plan))
    if running.dry_run:
        report_plan(output, plan, target, command, threads=running.threads)
        return
    with show_progress(plan.moved_bytes, f"{command}ing", running.progress) as on_progress:
        result = run_conversion(
            plan,
            checkpoint,
            target,
            options,
            threads=running.threads,
            fsync=running.fsync,
            overwrite=running.overwrite,
            resume=running.resume,
            verify=running.verify,
            on_progress=on_progress,
        )
    report_result(output, plan, result, command)
