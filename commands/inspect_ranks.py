"""The views of `ckpt inspect` by rank: a table of who holds what, and a map of the model's parts and the ranks, drawn or as SVG."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..inspection.tensors import span
from .output import Bytes, Output, note

if TYPE_CHECKING:
    from ..inspection.ranks import Piece, RankShare, Shares

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")  # one a virtual stage, from the first again after the last
CELL, LINE, LEFT, TOP = 64, 18, 130, 40  # pixels of the SVG


def rank_table(output: Output, shares: Shares) -> dict[str, Any]:
    """Per rank: place, parameters, bytes, bytes of optimizer state, layers and experts."""
    ranks = shares.ranks
    if output.is_json:
        listed = [{k.replace("nbytes", "bytes"): v for k, v in asdict(r).items() if k != "pieces"} for r in ranks]
        return {"by": {"key": "rank", "layout": _layout(shares), "ranks": listed}}
    _say(shares)
    axes = [n for n in ("tp", "pp", "ep", "etp") if n in ("tp", "pp") or any(getattr(r, n) for r in ranks)]
    if all(r.etp == r.tp for r in ranks):
        axes = [n for n in axes if n != "etp"]
    experts = any(r.experts for r in ranks)
    columns = ["rank", *axes, "parameters", "bytes", "optimizer", "layers", *(["experts"] if experts else [])]
    rows = [
        [
            r.rank,
            *(getattr(r, n) for n in axes),
            r.parameters,
            Bytes(r.nbytes),
            None if r.optimizer_nbytes is None else Bytes(r.optimizer_nbytes),
            span(r.layers),
            *([span(r.experts)] if experts else []),
        ]
        for r in ranks
    ]
    output.table(columns, rows)
    return {}


def layout_map(output: Output, shares: Shares) -> dict[str, Any]:
    """Parts of the model, from the embedding to the head, by ranks: one column a rank, or a pipeline stage where a line has no room."""
    if output.is_json:
        held = [{"rank": r.rank, "pieces": {p: asdict(piece) for p, piece in r.pieces.items()}} for r in shares.ranks]
        return {"layout_map": {"layout": _layout(shares), "parts": list(shares.parts), "ranks": held}}
    _say(shares)
    columns = [[r] for r in shares.ranks]
    if output.format == "tsv":
        rows = [(p, *(_text(p, c, shares) for c in columns)) for p in shares.parts]
        output.table(("part", *(f"rank {r.rank}" for r in shares.ranks)), rows)
        return {}
    left = max(map(len, shares.parts), default=0) + 2
    room = shutil.get_terminal_size((100, 24)).columns - left
    if _width(columns, shares) * len(columns) > room:
        columns = [list(g) for _, g in groupby(shares.ranks, key=lambda r: r.pp)]
    width = _width(columns, shares)
    per_line = max(1, room // width)
    if output.format == "md":
        output.table(("part", *(_title(c) for c in columns)), [(p, *(_text(p, c, shares) for c in columns)) for p in shares.parts])
        return {}
    for first in range(0, len(columns), per_line):
        shown = columns[first : first + per_line]
        if first:
            output.text()
        output.text(("rank".ljust(left) + "".join(_title(c).ljust(width) for c in shown)).rstrip())
        for part in shares.parts:
            cells = (_text(part, c, shares) for c in shown)
            output.text((part.ljust(left) + "".join((_bar(width) if cell == "held" else cell).ljust(width) for cell in cells)).rstrip())
    return {}


def write_svg(path: Path, shares: Shares) -> None:
    """The same map as an SVG drawing; a colour is a virtual stage. Nothing but numbers and words of ckpt's own goes into it."""
    from html import escape

    ranks, parts = shares.ranks, shares.parts
    size = (LEFT + CELL * len(ranks) + 10, TOP + LINE * len(parts) + 10)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(_sentence(shares))}</title>",
        f'<text x="6" y="{TOP - 22}">{escape(_sentence(shares))}</text>',
    ]
    for column, share in enumerate(ranks):
        x = LEFT + column * CELL
        lines.append(f'<text x="{x + CELL // 2}" y="{TOP - 6}" text-anchor="middle">rank {share.rank}</text>')
        for row, part in enumerate(parts):
            piece = share.pieces.get(part)
            if piece is None:
                continue
            y = TOP + row * LINE
            colour = COLOURS[piece.chunks[0] % len(COLOURS)]
            lines.append(f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{LINE - 2}" fill="{colour}"/>')
            if piece.experts:
                lines.append(f'<text x="{x + CELL // 2}" y="{y + 13}" text-anchor="middle" fill="white">{span(piece.experts)}</text>')
    lines += [f'<text x="6" y="{TOP + row * LINE + 13}">{escape(part)}</text>' for row, part in enumerate(parts)]
    path.write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def _say(shares: Shares) -> None:
    note(_sentence(shares))
    layout = shares.layout
    copies = layout.tp * layout.pp * layout.cp * layout.dp // len(shares.ranks)
    if copies > 1:
        note(f"{copies} data- or context-parallel ranks hold the same as each of these; a distributed optimizer's state they share")


def _sentence(shares: Shares) -> str:
    sizes = _layout(shares)
    ranks = len(shares.ranks)
    return f"layout {', '.join(f'{k} {v}' for k, v in sizes.items())}; {ranks} rank{'s' * (ranks != 1)}"


def _layout(shares: Shares) -> dict[str, Any]:
    layout = shares.layout
    sizes: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp}
    if layout.virtual > 1:
        sizes["vpp"] = layout.virtual
    if layout.ep > 1:
        sizes["ep"] = layout.ep
    if layout.expert_tp != layout.tp:
        sizes["etp"] = layout.expert_tp
    more = {"first_layers": layout.first_layers, "last_layers": layout.last_layers, "pipeline": layout.pipeline}
    return {**sizes, **{k: v for k, v in more.items() if v is not None}}


def _text(part: str, column: Sequence[RankShare], shares: Shares) -> str:
    """What the ranks of a column hold of a part: "" nothing, "held", or the virtual stage and the experts where these tell ranks apart."""
    pieces = [p for share in column if (p := share.pieces.get(part)) is not None]
    if not pieces:
        return ""
    words = _words(pieces, shares)
    return " ".join(words) or "held"


def _words(pieces: Sequence[Piece], shares: Shares) -> list[str]:
    chunks = sorted({c for p in pieces for c in p.chunks})
    experts = sorted({e for p in pieces for e in p.experts})
    return [*([f"v{span(chunks)}"] if shares.layout.virtual > 1 else []), *([f"e{span(experts)}"] if experts else [])]


def _title(column: Sequence[RankShare]) -> str:
    return span(r.rank for r in column)


def _width(columns: Sequence[Sequence[RankShare]], shares: Shares) -> int:
    texts = [_title(c) for c in columns] + [_text(p, c, shares) for c in columns for p in shares.parts]
    return max(map(len, texts), default=0) + 2


def _bar(width: int) -> str:
    fits = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return ("\u2588" if fits else "#") * (width - 2)
