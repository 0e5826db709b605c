"""ckpt inspect: what a checkpoint is, told from its headers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .layout_options import EP, ETP, FIRST, LAST, PIPELINE, PP, TP, VPP

EPILOG = """Examples:

  ckpt inspect runs/llama                       iteration, model, layout, ...

  ckpt inspect runs/llama '*.linear_qkv.*'      tensors whose name matches

  ckpt inspect runs/llama --layers norm         stacked layers taken apart

  ckpt inspect hf/ --by dtype                   bytes of each dtype

  ckpt inspect runs/llama --by rank --tp 8 --pp 4   who would hold what at another layout

  ckpt inspect hf/ --stats 'model.layers.0.*'   values of these tensors

  ckpt inspect runs/llama --fingerprint         a hash of the weights"""


def inspect(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Run folder, one iteration folder, HF folder or .safetensors file.", show_default=False)
    ],
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="GLOB", help="Only tensors whose name matches, such as '*.bias' or a part of it.", show_default=False),
    ] = None,
    iteration: Annotated[str, typer.Option(help="latest (what the tracker says), a number, or release.")] = "latest",
    tensors: Annotated[bool, typer.Option("--tensors", help="List the stored tensors.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="List every layer and expert, also when they are stored as one tensor.")] = False,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="module|dtype|file|rank", help="Sums by module, dtype, file or rank.", show_default=False),
    ] = None,
    layout_map: Annotated[bool, typer.Option("--layout-map", help="Draw which ranks hold which layers and experts.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write that drawing as SVG to this file.", show_default=False)] = None,
    tp: TP = None,
    pp: PP = None,
    vpp: VPP = None,
    ep: EP = None,
    etp: ETP = None,
    first_layers: FIRST = None,
    last_layers: LAST = None,
    pipeline_layout: PIPELINE = None,
    stats: Annotated[bool, typer.Option("--stats", help="Read tensors: smallest, largest, mean value, NaNs, infinities, zeros.")] = False,
    args: Annotated[bool, typer.Option("--args", help="List the stored Megatron arguments, or the fields of config.json.")] = False,
    fingerprint: Annotated[
        bool, typer.Option("--fingerprint", help="Read the weights: a hash that does not depend on format and layout.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Worker threads of --stats and --fingerprint.")] = 2,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress on a terminal.")] = True,
    format: Annotated[str, typer.Option("--format", help="auto, table, tsv, json or md.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Show what a checkpoint holds, reading headers only.

    Says the format, how the iteration was chosen and which others exist, parameters, dtypes, the writer's layout and version,
    the model, and whether the optimizer state can be resharded. No tensor is read except by --stats and --fingerprint.
    --by rank and --layout-map say who holds what in the layout of the run, or in the one that --tp, --pp, ... describe.
    """
    import gc

    from ..inspection.overview import open_for_inspection
    from .inspect_views import Request, check_views, show
    from .output import Output

    output = Output("json" if json else format)
    sizes: dict[str, int | str | None] = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp}
    sizes |= {"first_layers": first_layers, "last_layers": last_layers, "pipeline": pipeline_layout}
    wanted = Request(pattern, tensors, layers, by, stats, args, fingerprint, threads, progress, layout_map, svg, sizes)
    check_views(wanted, output)
    gc.disable()  # a large index is a million objects that stay: looking through them again and again doubles the time
    opened = open_for_inspection(source, iteration)
    gc.freeze()
    gc.enable()
    show(output, wanted, opened)
