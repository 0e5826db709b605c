"""ckpt verify-resume: whether training continues after save, conversion and load as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .main import DONE, NO

if TYPE_CHECKING:
    from ..resume.result import Verified
    from ..resume.settings import Settings

EPILOG = """Examples:

  ckpt verify-resume                                            8 steps straight against 4 + save + load + 4: a tiny model, no GPU

  ckpt verify-resume --via hf                                   the weights go through a Hugging Face folder in between

  ckpt verify-resume --tp 2 --via torch --via reshard:tp=1,pp=2 other form, other layout

  ckpt verify-resume runs/llama --max-layers 2                  from the state of a real run, its first two layers

  ckpt verify-resume --inject stale-master                      a mistake on purpose: must be seen and named

Exit status: 0 the run continues, 1 it does not, 2 it could not be tried. `ckpt explain R103` tells more about a reason."""

LAYOUT, EXPERIMENT, MODEL, SHOW = "Layout", "Experiment", "Model", "Output"


def verify_resume(
    source: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run folder to start from; without it a tiny model is trained.", show_default=False),
    ] = None,
    via: Annotated[
        list[str] | None,
        typer.Option(
            "--via",
            metavar="STAGE",
            help="What happens between save and load: hf, torch, torch_dist, split, lora, reshard:tp=2,pp=1. Repeat for a chain.",
            show_default=False,
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps of the run that never stops.", rich_help_panel=EXPERIMENT)] = 8,
    save_at: Annotated[
        int | None,
        typer.Option("--save-at", help="Steps before the save; default: half.", show_default=False, rich_help_panel=EXPERIMENT),
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option(
            "--inject",
            metavar="MISTAKE",
            help="Make a mistake while loading, to see it caught: drop-optimizer, swap-gate-up, ...",
            show_default=False,
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    ckpt_format: Annotated[
        str, typer.Option("--ckpt-format", help="What is saved: torch_dist or torch.", rich_help_panel=EXPERIMENT)
    ] = "torch_dist",
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer", help="distributed or plain; default: as the checkpoint's.", show_default=False, rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    sequences: Annotated[int, typer.Option("--global-batch-size", help="Sequences of a step.", rich_help_panel=EXPERIMENT)] = 8,
    length: Annotated[int, typer.Option("--seq-length", help="Tokens of a sequence.", rich_help_panel=EXPERIMENT)] = 32,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate, where no checkpoint tells.", rich_help_panel=EXPERIMENT)] = 5e-3,
    dropout: Annotated[
        float | None,
        typer.Option("--dropout", help="Default: 0.1 where the layout stays, else 0.", show_default=False, rich_help_panel=EXPERIMENT),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of data and dropout.", rich_help_panel=EXPERIMENT)] = 1234,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel size.", rich_help_panel=LAYOUT)] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline stages.", rich_help_panel=LAYOUT)] = 1,
    vpp: Annotated[int, typer.Option("--vpp", help="Virtual stages per pipeline rank.", rich_help_panel=LAYOUT)] = 1,
    ep: Annotated[int, typer.Option("--ep", help="Ranks that share the experts.", rich_help_panel=LAYOUT)] = 1,
    etp: Annotated[
        int | None,
        typer.Option(
            "--etp", help="Tensor-parallel size of experts; default: as --tp.", show_default=False, rich_help_panel=LAYOUT,
        )
    ] = None,
    dp: Annotated[int, typer.Option("--dp", help="Data-parallel size.", rich_help_panel=LAYOUT)] = 1,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="FILE", help="HF config.json or folder of the model to train.", show_default=False, rich_help_panel=MODEL,
        ),
    ] = None,
    iteration: Annotated[str, typer.Option("--iteration", help="latest, or a number.", rich_help_panel=MODEL)] = "latest",
    max_layers: Annotated[
        int | None,
        typer.Option("--max-layers", help="Only the first layers of the model.", show_default=False, rich_help_panel=MODEL),
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", help="Model family, where it cannot be told.", show_default=False, rich_help_panel=MODEL)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bfloat16 or float32; default: as the model's.", show_default=False, rich_help_panel=MODEL)
    ] = None,
    spec: Annotated[str, typer.Option("--spec", help="Layers: auto, te (Transformer Engine) or local.", rich_help_panel=MODEL)] = "auto",
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE.html", help="Curves and tables as a page.", show_default=False, rich_help_panel=SHOW,
        )
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="DIR", help="Keep all that was made, logs too.", show_default=False, rich_help_panel=SHOW,
        )
    ] = None,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress.", rich_help_panel=SHOW)] = True,
    format: Annotated[str, typer.Option("--format", help="auto, table, tsv, json, md, github or junit.", rich_help_panel=SHOW)] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.", rich_help_panel=SHOW)] = False,
) -> int:
    """Train a model twice with megatron-core: once without stopping, once with save, conversion, load. Compare all of it.

    Weights, master weights, moments, step counts, schedule, random states, data position, loss, gradient norm: to the bit where the
    layout stays; where it changes, against the noise that two uninterrupted runs in the two layouts show. Needs the extra `train`.
    """
    from ..layout import ParallelLayout
    from ..resume.settings import TINY, Settings, parse_stage
    from .ci_formats import Style
    from .verify_resume_report import show

    style = Style("json" if json else format)
    settings = Settings(
        config=_config(config) if config else dict(TINY),
        run=source,
        iteration=iteration,
        max_layers=max_layers,
        family=family,
        steps=steps,
        save_at=save_at,
        layout=ParallelLayout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=dp),
        via=tuple(parse_stage(text) for text in via or ()),
        optimizer=optimizer,
        form=ckpt_format,
        dtype=dtype,
        spec=spec,
        dropout=dropout,
        sequences=sequences,
        length=length,
        seed=seed,
        rate=lr,
        inject=inject,
    )
    found = _run(settings, keep, progress)
    show(style, found, report)
    return DONE if found.same else NO


def _config(path: str) -> dict[str, Any]:
    """A config.json, given itself or by its folder."""
    import os

    from ..formats.hf import read_json

    return read_json(os.path.join(path, "config.json") if os.path.isdir(path) else path)


def _run(settings: Settings, keep: Path | None, progress: bool) -> Verified:
    from tempfile import TemporaryDirectory

    from ..errors import CkptError
    from ..resume.experiment import Events, verify
    from .progress import Stages

    with Stages(progress, 2 * settings.steps + settings.saved_after) as stages:
        events = Events(lambda job, iteration, until: stages.step(f"{job}: iteration {iteration} of {until}"), stages.stage)
        if keep is None:
            with TemporaryDirectory(prefix="ckpt-verify-resume-") as folder:
                return verify(settings, Path(folder), events)
        if keep.exists() and any(keep.iterdir()):
            raise CkptError("E408", "the folder to keep everything in is not empty", where=str(keep))
        keep.mkdir(parents=True, exist_ok=True)
        return verify(settings, keep, events)
