"""A comparison as one HTML page that needs nothing else: tables, and histograms as inline SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .result import Difference

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #d8dee4 }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere } th { font-weight: 600; white-space: nowrap }
.good { color: #116329 } .bad { color: #a40e26 } .bar { fill: #4a7fb5 } text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
@media (prefers-color-scheme: dark) {
  body { color: #dfe4ea; background: #14171b } th, td { border-color: #363d45 } .good { color: #57c271 } .bad { color: #ff8080 }
  .bar { fill: #6ea3d8 } text { fill: #dfe4ea }
}"""
HEIGHT, STEP, LABEL, LONGEST = 22, 26, 130, 560  # pixels of a bar, from bar to bar, of its label, of the longest bar


def page(found: Difference, verdict: str, clean: Callable[[str], str]) -> str:
    """The whole page. verdict: its first line; clean: makes text from files harmless before it is escaped."""

    def text(value: Any) -> str:
        return escape(clean(str(value)))

    def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
        head = "".join(f"<th>{text(c)}</th>" for c in columns)
        body = "".join("<tr>" + "".join(f"<td>{text(_shown(v))}</td>" for v in row) + "</tr>\n" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"

    parts = [f'<h1>ckpt diff: <span class="{"good" if found.equal else "bad"}">{text(verdict)}</span></h1>']
    sides = [(n, s.directory, s.format, s.label or "", s.chosen) for n, s in (("A", found.a), ("B", found.b))]
    parts.append(table(("", "folder", "format", "iteration", "chosen"), sides))
    parts.append(f"<p>{found.tensors} tensors, {found.elements:,} elements, {found.nbytes:,} bytes of A were compared.</p>")
    sections: list[tuple[str, str]] = []
    if found.causes:
        rows = [("" if c.exact else "perhaps", f"B {c.text}", len(c.tensors), ", ".join(c.tensors[:8])) for c in found.causes]
        sections.append(("Likely causes", table(("", "cause", "tensors", "such as"), rows)))
    for title, missing in (("Only in A", found.only_a), ("Only in B", found.only_b)):
        if missing:
            lines = [(m.name, m.dtype, m.shape, m.nearest) for m in missing]
            sections.append((title, table(("tensor", "dtype", "shape", "nearest"), lines)))
    for title, unlike in (("Shapes", found.shapes), ("Dtypes", found.dtypes), ("Settings", found.config)):
        if unlike:
            sections.append((title, table(("", "A", "B"), [(u.name, u.a, u.b) for u in unlike])))
    if found.values:
        sections.append(("How far apart: elements by |A - B|", bars(found.histogram)))
        columns = ("tensor", "shape", "differing", "of", "max abs", "at", "max rel", "max ulp", "cosine", "|A - B|")
        body = "".join(
            "<tr>"
            + "".join(
                f"<td>{text(_shown(x))}</td>"
                for x in (v.name, v.shape, v.differing, v.count, v.max_abs, v.max_abs_at, v.max_rel, v.max_ulp, v.cosine)
            )
            + f"<td>{spark(v.histogram)}</td></tr>\n"
            for v in sorted(found.values, key=lambda v: -v.max_abs)
        )
        head = "".join(f"<th>{text(c)}</th>" for c in columns)
        sections.append(("Values", f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"))
    if found.notes:
        sections.append(("Remarks", table(("", "about", ""), [(n.kind, n.subject, n.text) for n in found.notes])))
    parts += [f"<h2>{text(title)}</h2>\n{body}" for title, body in sections]
    head = f'<meta charset="utf-8"><title>ckpt diff</title>\n<style>\n{STYLE}\n</style>'
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n' + "\n".join(parts) + "\n</body>\n</html>\n"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) if value and isinstance(value[0], str) else str(list(value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def bars(histogram: Mapping[int, int]) -> str:
    """One bar per power of ten, with its number of elements."""
    if not histogram:
        return "<p>No finite difference (signs of zeros, NaN or infinities only).</p>"
    decades = range(min(histogram), max(histogram) + 1)
    most = max(histogram.values())
    lines = []
    for row, decade in enumerate(decades):
        count, y = histogram.get(decade, 0), row * STEP
        width = LONGEST * count / most
        lines.append(f'<text x="0" y="{y + 16}">1e{decade:+03d} to 1e{decade + 1:+03d}</text>')
        lines.append(f'<rect class="bar" x="{LABEL}" y="{y}" width="{width:.1f}" height="{HEIGHT}"/>')
        lines.append(f'<text x="{LABEL + width + 8:.1f}" y="{y + 16}">{count:,}</text>')
    height, total = len(decades) * STEP, LABEL + LONGEST + 140
    size = f'viewBox="0 0 {total} {height}" width="{total}" height="{height}"'
    return f'<svg role="img" aria-label="histogram" {size}>\n' + "\n".join(lines) + "\n</svg>"


def spark(histogram: Mapping[int, int]) -> str:
    """The same as a small picture for a table."""
    if not histogram:
        return ""
    low, most = min(histogram), max(histogram.values())
    columns = [
        f'<rect class="bar" x="{8 * (k - low)}" y="{20 - max(1, 20 * v / most):.1f}" width="7" height="{max(1, 20 * v / most):.1f}">'
        f"<title>1e{k:+03d}: {v:,}</title></rect>"
        for k, v in sorted(histogram.items())
    ]
    width = 8 * (max(histogram) - low + 1)
    return f'<svg viewBox="0 0 {width} 20" width="{width}" height="20">{"".join(columns)}</svg>'
