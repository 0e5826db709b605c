"""ckpt diff: whether two checkpoints hold the same model, whatever their formats and layouts."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from .main import DONE, NO

EPILOG = """Examples:

  ckpt diff llama/ runs/llama                        HF weights against a run, at any TP and PP

  ckpt diff runs/a runs/b --optimizer                weights, optimizer state, step, schedule

  ckpt diff runs/a/iter_0000100 runs/a --tol 1ulp    one iteration against the latest

  ckpt diff a/ b/ --tensors '*.layers.0.*' --all     every differing tensor of one layer

  ckpt diff a/ b/ --md                               for a pull request;  --report diff.html for a page

Exit status: 0 equal, 1 they differ, 2 could not be compared."""


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Run, iteration or HF folder, or file: the reference.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="What is compared with it, in any format and layout.", show_default=False)],
    tensors: Annotated[
        str | None, typer.Option("--tensors", metavar="GLOB", help="Only tensors whose name matches.", show_default=False)
    ] = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Optimizer state, step and schedule too (Megatron formats).")] = False,
    tol: Annotated[
        str | None,
        typer.Option("--tol", metavar="TOL", help="Values this close count as equal: 1e-6, 1e-3rel, 0.1%, 2ulp.", show_default=False),
    ] = None,
    no_values: Annotated[bool, typer.Option("--no-values", help="Names, shapes, dtypes and settings only; reads headers.")] = False,
    ignore: Annotated[
        str | None, typer.Option("--ignore", metavar="dtype,config", help="What counts as no difference.", show_default=False)
    ] = None,
    iteration_a: Annotated[str, typer.Option("--iteration-a", help="Of A: latest, a number, or release.")] = "latest",
    iteration_b: Annotated[str, typer.Option("--iteration-b", help="Of B: latest, a number, or release.")] = "latest",
    family: Annotated[str | None, typer.Option("--family", help="Model family, where it cannot be told.", show_default=False)] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="List every difference, not the largest 20.")] = False,
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE.html", help="Write a page with everything, too.", show_default=False)
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Worker threads.")] = 2,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress on a terminal.")] = True,
    format: Annotated[str, typer.Option("--format", help="auto, table, tsv, json or md.")] = "auto",
    md: Annotated[bool, typer.Option("--md", help="Same as --format md.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> int:
    """Compare two checkpoints: names, shapes, dtypes, settings, then every value, and say the likely cause of what differs.

    Both sides are read under one naming, nothing is converted, and memory does not grow with the model. Vocabulary padding is reported,
    it is no difference.
    """
    from ..diff.compare import DiffOptions, prepare_diff, run_diff
    from ..diff.tolerance import EXACT, parse_tolerance
    from ..errors import CkptError
    from .diff_report import show, write_page
    from .output import Output
    from .progress import progress as progress_of

    output = Output("json" if json else "md" if md else format)
    ignored = frozenset(word.strip() for word in (ignore or "").split(",") if word.strip())
    if ignored - {"dtype", "config"}:
        raise CkptError("E001", "--ignore takes dtype and config", found=", ".join(sorted(ignored)))
    if report and os.path.lexists(report):
        raise CkptError("E573", "there is already a file of this name", where=report, hint="give --report another name")
    options = DiffOptions(
        iteration_a,
        iteration_b,
        tensors,
        optimizer,
        parse_tolerance(tol) if tol else EXACT,
        not no_values,
        ignored,
        family,
        threads,
    )
    prepared = prepare_diff(a, b, options)
    with progress_of(prepared.nbytes, "comparing", progress) as on_progress:
        found = run_diff(prepared, on_progress)
    show(output, found, whole=all_rows)
    if report:
        write_page(found, report)
    return DONE if found.equal else NO
