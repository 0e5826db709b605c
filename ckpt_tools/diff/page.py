"""A comparison as one HTML page that needs nothing else: tables, and histograms as inline SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..pages import Page
from .result import Difference

HEIGHT, STEP, LABEL, LONGEST = 22, 26, 130, 560  # pixels of a bar, from bar to bar, of its label, of the longest bar


def page(found: Difference, verdict: str, clean: Callable[[str], str]) -> str:
    """The whole page. verdict: its first line; clean: makes text from files harmless before it is escaped."""
    made = Page("ckpt diff", clean)
    made.verdict(found.equal, verdict)
    sides = [(n, s.directory, s.format, s.label or "", s.chosen) for n, s in (("A", found.a), ("B", found.b))]
    made.add(made.table(("", "folder", "format", "iteration", "chosen"), sides))
    made.add(f"<p>{found.tensors} tensors, {found.elements:,} elements, {found.nbytes:,} bytes of A were compared.</p>")
    if found.causes:
        rows = [("" if c.exact else "perhaps", f"B {c.text}", len(c.tensors), ", ".join(c.tensors[:8])) for c in found.causes]
        made.add(made.table(("", "cause", "tensors", "such as"), rows), "Likely causes")
    for title, missing in (("Only in A", found.only_a), ("Only in B", found.only_b)):
        if missing:
            lines = [(m.name, m.dtype, m.shape, m.nearest) for m in missing]
            made.add(made.table(("tensor", "dtype", "shape", "nearest"), lines), title)
    for title, unlike in (("Shapes", found.shapes), ("Dtypes", found.dtypes), ("Settings", found.config)):
        if unlike:
            made.add(made.table(("", "A", "B"), [(u.name, u.a, u.b) for u in unlike]), title)
    if found.values:
        made.add(bars(found.histogram), "How far apart: elements by |A - B|")
        columns = ("tensor", "shape", "differing", "of", "max abs", "at", "max rel", "max ulp", "cosine", "|A - B|")
        worst = sorted(found.values, key=lambda v: -v.max_abs)
        cells = [(v.name, v.shape, v.differing, v.count, v.max_abs, v.max_abs_at, v.max_rel, v.max_ulp, v.cosine) for v in worst]
        made.add(made.table(columns, cells, lambda n: spark(worst[n].histogram)), "Values")
    if found.notes:
        made.add(made.table(("", "about", ""), [(n.kind, n.subject, n.text) for n in found.notes]), "Remarks")
    return made.html()


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
