"""HTML pages that need nothing else: one style, tables of text that was made harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #d8dee4 }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere } th { font-weight: 600; white-space: nowrap }
.good { color: #116329 } .bad { color: #a40e26 } .bar { fill: #4a7fb5 } text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
.axis { stroke: #8c959f; stroke-width: 1 } .curve { fill: none; stroke-width: 2 } .first { stroke: #4a7fb5 } .second { stroke: #c2571a }
.third { stroke: #8c959f; stroke-dasharray: 4 3 } .mark { stroke: #8c959f; stroke-dasharray: 2 3 }
@media (prefers-color-scheme: dark) {
  body { color: #dfe4ea; background: #14171b } th, td { border-color: #363d45 } .good { color: #57c271 } .bad { color: #ff8080 }
  .bar { fill: #6ea3d8 } text { fill: #dfe4ea } .first { stroke: #6ea3d8 } .second { stroke: #f0965a }
}"""


class Page:
    """Puts a page together. clean: makes text from files harmless before it is escaped."""

    def __init__(self, title: str, clean: Callable[[str], str]) -> None:
        self._title, self._clean = title, clean
        self._parts: list[str] = []

    def text(self, value: Any) -> str:
        """A value as harmless text."""
        return escape(self._clean(str(value)))

    def verdict(self, good: bool, told: str) -> None:
        """The first line."""
        self._parts.append(f'<h1>{self.text(self._title)}: <span class="{"good" if good else "bad"}">{self.text(told)}</span></h1>')

    def add(self, html: str, title: str = "") -> None:
        """A part that is HTML already, under a heading."""
        self._parts.append((f"<h2>{self.text(title)}</h2>\n" if title else "") + html)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], extra: Callable[[int], str] = lambda _: "") -> str:
        """A table; `extra` gives HTML for one more cell of row n, under the last column."""
        head = "".join(f"<th>{self.text(c)}</th>" for c in columns)
        lines = []
        for number, row in enumerate(rows):
            cells = "".join(f"<td>{self.text(shown(v))}</td>" for v in row)
            more = extra(number)
            lines.append(f"<tr>{cells}{f'<td>{more}</td>' if len(row) < len(columns) else ''}</tr>\n")
        return f"<table><thead><tr>{head}</tr></thead><tbody>\n{''.join(lines)}</tbody></table>"

    def html(self) -> str:
        """The whole page."""
        head = f'<meta charset="utf-8"><title>{self.text(self._title)}</title>\n<style>\n{STYLE}\n</style>'
        body = "\n".join(self._parts)
        return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def shown(value: Any) -> str:
    """A value in a cell: numbers grouped, - for nothing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) if value and isinstance(value[0], str) else str(list(value))
    return f"{value:,}" if isinstance(value, int) else str(value)
