"""The answer as one HTML page: the verdict, what explains it, the curves of the runs, and a table of everything compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..pages import Page
from .result import DIFFERS, Point, Row, Verified

WIDTH, HEIGHT, LEFT, BELOW = 620, 200, 70, 30  # pixels of the plot, and of the margins with numbers


def page(found: Verified, verdict: str, clean: Callable[[str], str]) -> str:
    """The whole page. verdict: its first line; clean: makes text from files harmless before it is escaped."""
    made = Page("ckpt verify-resume", clean)
    made.verdict(found.same, verdict)
    path = " -> ".join(("save", *found.path, "load"))
    layout = found.layout if found.exact else f"{found.layout}, then {found.resumed_layout}"
    facts = [
        ("model", found.model),
        ("from", found.source),
        ("iterations", f"{found.start} to {found.end}, saved after {found.saved}"),
        ("layout", layout),
        ("path", path),
    ]
    made.add(made.table(("", ""), facts))
    if found.reasons:
        rows = [(r.severity, r.code, r.component, r.text, r.tensor, r.expected, r.found) for r in found.reasons]
        made.add(made.table(("", "code", "part", "what", "tensor", "expected", "found"), rows), "What explains it")
    for title, value in (("Loss", _loss), ("Gradient norm", _norm), ("Learning rate", _rate)):
        plot = curves(found, value)
        if plot:
            made.add(plot, title)
    if found.rows:
        columns = ("part", "when", "answer", "differing", "of", "from iteration", "first tensor", "largest", "noise floor", "compared")
        made.add(made.table(columns, [_cells(row) for row in found.rows]), "Part by part")
    if found.notes:
        made.add(made.table(("",), [(note,) for note in found.notes]), "Remarks")
    return made.html()


def _cells(row: Row) -> tuple[Any, ...]:
    told = row.verdict.upper() if row.verdict == DIFFERS else row.verdict
    where = (row.iteration, row.tensor or None, row.largest, row.floor)
    return (row.component, row.when, told, row.differing, row.total, *where, row.compared)


def _loss(point: Point) -> float | None:
    return point.loss


def _norm(point: Point) -> float | None:
    return point.grad_norm


def _rate(point: Point) -> float | None:
    return point.lr


def curves(found: Verified, value: Callable[[Point], float | None]) -> str:
    """One quantity of the runs over the iterations as inline SVG; "" without any."""
    other = ("straight in the second layout", "third", found.other)
    runs = [("straight", "first", found.straight), ("resumed", "second", found.resumed), other]
    points = [(p.iteration, v) for _, _, run in runs for p in run if (v := value(p)) is not None]
    if not points:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = min(i for i, _ in points), max(i for i, _ in points)
    spread, steps = (high - low) or 1.0, (last - first) or 1

    def place(iteration: int, number: float) -> str:
        return f"{LEFT + WIDTH * (iteration - first) / steps:.1f},{8 + HEIGHT * (high - number) / spread:.1f}"

    bottom = 8 + HEIGHT
    lines = [f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{LEFT + WIDTH}" y2="{bottom}"/>']
    if first <= found.saved <= last:
        x = LEFT + WIDTH * (found.saved - first) / steps
        lines.append(f'<line class="mark" x1="{x:.1f}" y1="8" x2="{x:.1f}" y2="{bottom}"/><text x="{x + 4:.1f}" y="20">saved</text>')
    for number in (low, high):
        y = float(place(first, number).split(",")[1])
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number:.5g}</text>')
    for iteration in (first, last):
        x = float(place(iteration, low).split(",")[0])
        lines.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{iteration}</text>')
    lines += _drawn(runs, value, place)
    size = f'viewBox="0 0 {LEFT + WIDTH + 230} {bottom + BELOW}" width="{LEFT + WIDTH + 230}" height="{bottom + BELOW}"'
    return f'<svg role="img" aria-label="curves" {size}>\n' + "\n".join(lines) + "\n</svg>"


def _drawn(
    runs: Sequence[tuple[str, str, Sequence[Point]]], value: Callable[[Point], float | None], place: Callable[[int, float], str]
) -> list[str]:
    lines = []
    for number, (name, kind, run) in enumerate(runs):
        known = [(p.iteration, v) for p in run if (v := value(p)) is not None]
        if not known:
            continue
        lines.append(f'<polyline class="curve {kind}" points="{" ".join(place(i, v) for i, v in known)}"/>')
        y = 24 + 20 * number
        lines.append(f'<line class="curve {kind}" x1="{LEFT + WIDTH + 12}" y1="{y}" x2="{LEFT + WIDTH + 40}" y2="{y}"/>')
        lines.append(f'<text x="{LEFT + WIDTH + 46}" y="{y + 4}">{name}</text>')
    return lines
