"""ckpt validate: whether a checkpoint is whole, consistent and what it says it is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .main import DONE, NO

EPILOG = """Examples:

  ckpt validate runs/llama                       the latest iteration: files, names, shapes, optimizer

  ckpt validate runs/llama --deep                checksums and every value too

  ckpt validate runs/llama --resume              training must be able to go on from it

  ckpt validate hf/ --fix                        mend index, total_size and tracker; shows what first

  ckpt validate hf/ --strict --format github     in CI: warnings count, findings as annotations

Exit status: 0 valid, 1 not valid, 2 could not be validated. `ckpt explain V301` tells more about a finding."""


def validate(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Run folder, one iteration folder, HF folder or .safetensors file.", show_default=False)
    ],
    iteration: Annotated[str, typer.Option(help="latest (what the tracker says), a number, or release.")] = "latest",
    deep: Annotated[bool, typer.Option("--deep", help="Read everything: checksums, NaN, zeros, copies, master weights.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="What training needs to go on must be there.")] = False,
    select: Annotated[
        str | None, typer.Option("--select", metavar="V2,V301", help="Only checks whose code begins so.", show_default=False)
    ] = None,
    ignore: Annotated[
        str | None, typer.Option("--ignore", metavar="V104", help="Not the checks whose code begins so.", show_default=False)
    ] = None,
    family: Annotated[str | None, typer.Option("--family", help="Model family, where it cannot be told.", show_default=False)] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Mend what is safe to mend, after showing what would be written.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: do not ask.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Worker threads of --deep.")] = 2,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress of --deep on a terminal.")] = True,
    format: Annotated[str, typer.Option("--format", help="auto, table, tsv, json, github, junit or md.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> int:
    """Check a checkpoint: files, index, records, names, shapes, dtypes, optimizer state, what lies where; with --deep every value.

    Every finding has a code, a place and a severity. Nothing is unpickled, nothing is changed unless --fix is given.
    """
    from ..validation.mend import apply_mends, plan_mends
    from ..validation.run import Options, codes_of, examine, look_at
    from .ci_formats import Style
    from .progress import progress as progress_of
    from .validate_report import show, show_mends

    style = Style("json" if json else format)
    options = Options(iteration, deep, strict, resume, codes_of(select), codes_of(ignore), family, threads)
    subject = look_at(source, options)
    with progress_of(subject.nbytes, "reading values", deep and progress) as on_progress:
        report = examine(subject, options, on_progress)
    mended: tuple[str, ...] = ()
    if fix:
        mends, refused = plan_mends(subject, report)
        show_mends(mends, refused)
        if mends and (yes or _agreed()):
            apply_mends(mends)
            mended = tuple(m.path for m in mends)
            report = examine(look_at(source, options), options)
    show(style, report, mended)
    return DONE if report.valid else NO


def _agreed() -> bool:
    """Whether the person at the terminal says yes; without one nothing is changed."""
    from .output import note

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        note("nothing was changed: --yes writes these files")
        return False
    sys.stderr.write("Write these files? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
