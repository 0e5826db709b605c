"""The options that describe a parallel layout, as convert and reshard take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..layout import ParallelLayout

PANEL = "Layout"
TP = Annotated[
    int | None,
    typer.Option("--tp", "--tensor-model-parallel-size", help="Tensor-parallel size.", show_default=False, rich_help_panel=PANEL),
]
PP = Annotated[
    int | None, typer.Option("--pp", "--pipeline-model-parallel-size", help="Pipeline stages.", show_default=False, rich_help_panel=PANEL)
]
VPP = Annotated[
    int | None,
    typer.Option(
        "--vpp",
        "--num-virtual-stages-per-pipeline-rank",
        help="Virtual stages per pipeline rank (legacy format).",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
EP = Annotated[
    int | None,
    typer.Option("--ep", "--expert-model-parallel-size", help="Ranks that share the experts.", show_default=False, rich_help_panel=PANEL),
]
ETP = Annotated[
    int | None,
    typer.Option(
        "--etp",
        "--expert-tensor-parallel-size",
        help="Tensor-parallel size of experts; default: as --tp.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
DP = Annotated[
    int | None,
    typer.Option(
        "--dp", "--data-parallel-size", help="Data-parallel size, for optimizer state.", show_default=False, rich_help_panel=PANEL
    ),
]
FIRST = Annotated[
    int | None,
    typer.Option(
        "--first-stage-layers",
        "--decoder-first-pipeline-num-layers",
        "--num-layers-in-first-pipeline-stage",
        help="Layers of the first stage, when uneven.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
LAST = Annotated[
    int | None,
    typer.Option(
        "--last-stage-layers",
        "--decoder-last-pipeline-num-layers",
        "--num-layers-in-last-pipeline-stage",
        help="Layers of the last stage, when uneven.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
PIPELINE = Annotated[
    str | None,
    typer.Option(
        "--pipeline-layout",
        "--pipeline-model-parallel-layout",
        help="Layout string as Megatron takes it.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
COUNT_EMBEDDING = Annotated[
    bool | None,
    typer.Option(
        "--account-for-embedding-in-pipeline-split",
        help="Count the embedding as a layer of the first stage.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
COUNT_LOSS = Annotated[
    bool | None,
    typer.Option(
        "--account-for-loss-in-pipeline-split",
        help="Count the loss as a layer of the last stage.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
SPEC = Annotated[
    str | None,
    typer.Option(
        "--spec", help="How the legacy format calls norms: te or local; default: as the source.", show_default=False, rich_help_panel=PANEL
    ),
]
EXPERTS = Annotated[
    str | None,
    typer.Option(
        "--experts",
        help="How the legacy format stores experts: te_grouped, sequential or grouped; default: as the source.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]


def target_layout(checkpoint: Checkpoint, **given: Any) -> ParallelLayout:
    """The layout that the options describe (fields of LayoutChanges); what is not given is as in the source."""
    from ..reshard import LayoutChanges, changed_layout, layout_of

    return changed_layout(layout_of(checkpoint), LayoutChanges(**given))
