"""The options that describe a parallel layout, as convert and reshard take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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
    int | None, typer.Option("--vpp", help="Virtual stages per pipeline rank (legacy format).", show_default=False, rich_help_panel=PANEL)
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
FIRST = Annotated[
    int | None,
    typer.Option(
        "--decoder-first-pipeline-num-layers", help="Layers of the first stage, when uneven.", show_default=False, rich_help_panel=PANEL
    ),
]
LAST = Annotated[
    int | None,
    typer.Option(
        "--decoder-last-pipeline-num-layers", help="Layers of the last stage, when uneven.", show_default=False, rich_help_panel=PANEL
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


def layout_of(
    tp: int | None,
    pp: int | None,
    vpp: int | None,
    ep: int | None,
    etp: int | None,
    first: int | None,
    last: int | None,
    pipeline: str | None,
) -> ParallelLayout:
    """The layout that the options describe; what is not given is 1."""
    from ..layout import ParallelLayout

    return ParallelLayout(
        tp=tp or 1, pp=pp or 1, vpp=vpp or 1, ep=ep or 1, etp=etp, first_layers=first, last_layers=last, pipeline=pipeline
    )
