"""The tensors of a checkpoint as a tree, folded over layers, short enough to read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..inspection.tensors import Kind, span
from .output import human_bytes

_FLAT_BUFFER = re.compile(r"^(.*optimizer\.distributed\.).*bucket_idx_\*(\.\w+)$")  # the middle says nothing: buffers and buckets by number
ROW_LIMIT = 60  # lines of the tree; a model of one kind of layer needs about twenty
NAME_WIDTH = 58


def tree_rows(kinds: Sequence[Kind]) -> list[tuple[str, str, str, str, str]]:
    """(name, dtype, shape of one, xN, size) for a table: every kind of weights, and a line per optimizer state."""
    weights, optimizer = _parts(kinds)
    return [*(_line(k.name, k, f"x{k.count}" if k.count > 1 else "") for k in weights), *_optimizer_rows(optimizer)]


def tree_lines(kinds: Sequence[Kind]) -> list[str]:
    """Lines of text: names indented below the layers they are in, dtype, shape, xN, size."""
    rows = list(_rows(kinds))
    hidden = len(rows) - ROW_LIMIT
    if hidden > 1:
        rows = rows[:ROW_LIMIT]
    head = ("tensor", "dtype", "shape", "", "size")
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(5)]
    widths[0] = min(widths[0], NAME_WIDTH)
    lines = []
    for row in (head, *rows):
        # A longer name pushes its own line to the right rather than all of them.
        cells = [cell.rjust(w) if i == 4 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    if hidden > 1:
        lines.append(f"and {hidden} more kinds of tensors; --tensors lists them all")
    return lines


def _rows(kinds: Sequence[Kind]) -> Iterator[tuple[str, str, str, str, str]]:
    weights, optimizer = _parts(kinds)
    stack: str | None = None
    for kind in weights:
        head, star, inside = kind.name.partition(".*.")
        if not star:
            stack = None
            yield _line(kind.name, kind, f"x{kind.count}" if kind.count > 1 else "")
            continue
        members = [k for k in weights if k.name.startswith(f"{head}.*.")]
        numbers = {n for k in members for n in k.numbers}
        if head != stack:
            stack = head
            note = ", one tensor for all" if all(k.stored == 1 and k.count > 1 for k in members) else ""
            yield f"{head}.*  x{len(numbers)}{note}", "", "", "", ""
        times = f"x{len(kind.numbers)}" + (f" x{kind.inner}" if kind.inner > 1 else "") if kind.inner else f"x{kind.count} in all"
        if set(kind.numbers) != numbers:
            times += f" ({span(kind.numbers)})"
        yield _line(f"  {inside}", kind, times)
    yield from _optimizer_rows(optimizer)


def _parts(kinds: Sequence[Kind]) -> tuple[list[Kind], list[Kind]]:
    return [k for k in kinds if k.part == "weights"], [k for k in kinds if k.part == "optimizer"]


def _line(name: str, kind: Kind, times: str) -> tuple[str, str, str, str, str]:
    return name, kind.dtype, f"[{', '.join(map(str, kind.shape))}]", times, human_bytes(kind.nbytes)


def _optimizer_rows(kinds: Sequence[Kind]) -> Iterator[tuple[str, str, str, str, str]]:
    """One line per state: its tensors are named like the weights, so listing them says nothing new."""
    states: dict[str, list[Kind]] = {}
    for kind in kinds:
        if kind.state:
            states.setdefault(kind.name[: kind.name.index(f".{kind.state}.") + len(kind.state) + 1], []).append(kind)
        else:
            yield _line(_FLAT_BUFFER.sub(r"\1*\2", kind.name), kind, f"x{kind.count}" if kind.count > 1 else "")
    for prefix, members in states.items():
        dtypes = sorted({k.dtype for k in members})
        yield f"{prefix}.*", ", ".join(dtypes), "", f"x{sum(k.count for k in members)}", human_bytes(sum(k.nbytes for k in members))
