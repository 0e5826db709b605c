"""The answer of a command on stdout, as a table, TSV, JSON or Markdown; everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from ..errors import CkptError
from .cells import Bytes, human, human_bytes, parse_size, plain, sanitize

__all__ = ["FORMATS", "Bytes", "Output", "human_bytes", "note", "parse_size", "render_error", "sanitize", "warn"]

FORMATS = ("auto", "table", "tsv", "json", "md")
LONG_LISTING = 200  # rows; above it a table is plain aligned text: rich needs 0.5 ms a row and 3,219 rows cost it 1.8 s


class Output:
    """Where a command puts its answer. Each method acts in the formats that it is for, so a command calls them all in turn.

        output = Output("json" if json else format)
        output.document("inspect", {"tensors": 291, ...})            # JSON only
        output.summary([("format", "torch_dist"), ("size", Bytes(n))])   # the others
        output.table(["name", "bytes"], rows)                        # the others

    Cells may be str, int, float, bool, None, Bytes (a size) or a sequence of ints (a shape); text is sanitized here.
    """

    def __init__(self, format: str = "auto") -> None:
        """`format` is one of FORMATS; auto is a table on a terminal and TSV in a pipe. CkptError E001 for another name."""
        if format not in FORMATS:
            raise CkptError("E001", "there is no such output format", found=repr(format), expected=", ".join(FORMATS))
        self.format = format if format != "auto" else "table" if sys.stdout.isatty() else "tsv"

    @property
    def is_json(self) -> bool:
        return self.format == "json"

    def document(self, command: str, value: Mapping[str, Any]) -> None:
        """The whole answer as one JSON object with "schema": "ckpt.<command>/1" first; nothing in other formats."""
        if self.is_json:
            import json

            text = json.dumps({"schema": f"ckpt.{command}/1", **value}, indent=2, ensure_ascii=True, allow_nan=False, default=_as_json)
            _write([text])

    def text(self, line: str = "") -> None:
        """A line for people; nothing in TSV and JSON."""
        if self.format in ("table", "md"):
            _write([sanitize(line)])

    def prose(self, title: str, text: str) -> None:
        """A heading and a paragraph, which is text in TSV too; nothing in JSON."""
        if not self.is_json:
            import shutil
            import textwrap

            width = min(100, shutil.get_terminal_size((100, 24)).columns)
            head = f"### {sanitize(title)}" if self.format == "md" else sanitize(title)
            _write([head, "", *textwrap.wrap(sanitize(" ".join(text.split())), width, break_long_words=False)])

    def summary(self, pairs: Sequence[tuple[str, Any]], title: str | None = None) -> None:
        """Key and value, one a line: a heading and aligned text for people, two columns in TSV. Pairs whose value is None are left out."""
        shown = [(k, v) for k, v in pairs if v is not None]
        if self.format == "tsv":
            _write([f"{sanitize(k)}\t{plain(v)}" for k, v in shown])
        elif self.format == "md":
            self._heading(title)
            _write(_markdown(("", ""), [(k, human(v)) for k, v in shown], ()))
        elif self.format == "table":
            self._heading(title)
            width = max((len(k) for k, _ in shown), default=0)
            bold, off = ("\x1b[1m", "\x1b[0m") if coloured(sys.stdout) else ("", "")
            _write([f"{bold}{sanitize(k)}{off}{' ' * (width - len(k))}  {human(v)}" for k, v in shown])

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
        """A listing: rich on a terminal, plain aligned text when long, TSV with a header line in a pipe and never wrapped."""
        if self.format == "tsv":
            _write(["\t".join(columns), *("\t".join(plain(v) for v in row) for row in rows)])
        elif self.format in ("table", "md"):
            cells = list(rows)
            right = tuple(i for i in range(len(columns)) if cells and all(isinstance(r[i], (int, float)) or r[i] is None for r in cells))
            texts = [tuple(human(v) for v in row) for row in cells]
            self._heading(title)
            if self.format == "md":
                _write(_markdown(columns, texts, right))
            elif len(texts) > LONG_LISTING or not sys.stdout.isatty():
                _write(_aligned(columns, texts, right))
            else:
                _rich(columns, texts, right)

    def _heading(self, title: str | None) -> None:
        if title:
            _write(["", f"### {sanitize(title)}", ""] if self.format == "md" else ["", sanitize(title)])


def _as_json(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _write(lines: Sequence[str]) -> None:
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        escaped = (c.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`") for c in cells)
        return f"| {' | '.join(escaped)} |"

    rule = " | ".join("---:" if i in right else "---" for i in range(len(columns)))
    return [line(columns), f"| {rule} |", *(line(r) for r in rows)]


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(c), *(len(r[i]) for r in rows)) if rows else len(c) for i, c in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))).rstrip()

    return [line(columns), *(line(r) for r in rows)]


def _rich(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text is shown as it is: no markup, no emoji codes
    Console(file=sys.stdout, markup=False, emoji=False, highlight=False).print(table)


def coloured(stream: IO[str]) -> bool:
    """Whether to colour what goes to `stream`: a terminal, and neither NO_COLOR nor TERM=dumb says otherwise."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def note(text: str) -> None:
    """A remark on stderr."""
    _say("note", "36", text)


def warn(text: str) -> None:
    """A warning on stderr."""
    _say("warning", "33", text)


def _say(label: str, colour: str, text: str) -> None:
    head = f"\x1b[1;{colour}m{label}\x1b[0m" if coloured(sys.stderr) else label
    sys.stdout.flush()  # so that the two streams read in order on one terminal
    sys.stderr.write(f"{head}: {_lines(text)}\n")


def render_error(error: CkptError) -> None:
    """A CkptError on stderr, as its __str__ but sanitized and, on a terminal, coloured."""
    red, dim, off = ("\x1b[1;31m", "\x1b[2m", "\x1b[0m") if coloured(sys.stderr) else ("", "", "")
    lines = [f"{red}error[{sanitize(error.code)}]{off}: {_lines(error.what)}"]
    for label in ("where", "expected", "found", "hint"):
        text = getattr(error, label)
        if text:
            lines.append(f"  {dim}{label}:{off} {_lines(text)}")
    sys.stdout.flush()
    sys.stderr.write("\n".join(lines) + "\n")


def _lines(text: str) -> str:
    """Sanitized, with line breaks kept but indented, so that no text from a file can pass for a line of ckpt."""
    return "\n    ".join(sanitize(line) for line in text.split("\n"))
