"""The answer of `ckpt diff`: for people, for pull requests, for programs, and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..diff.result import Cause, Difference, SideFacts, Values
from ..errors import CkptError
from .cells import Bytes, sanitize
from .output import Output, note, warn

ROWS = 20  # differences of one kind that are listed unless all are asked for
BAR = 40  # characters of the longest bar of the histogram


def show(output: Output, found: Difference, *, whole: bool) -> None:
    """Write the answer in the output's format; remarks go to stderr."""
    output.document("diff", document(found))
    if output.is_json:
        return
    for remark in found.notes:
        (warn if remark.kind == "warning" else note)(f"{remark.subject}: {remark.text}" if remark.subject else remark.text)
    if output.format == "tsv":
        output.table(("kind", "name", "a", "b"), _rows_for_programs(found))
        return
    output.summary(
        [
            ("answer", verdict(found)),
            ("A", _place(found.a)),
            ("B", _place(found.b)),
            ("names", "Hugging Face" if found.naming == "hf" else "Megatron-Core"),
            ("compared", f"{found.tensors} tensors, {found.elements:,} elements"),
            ("size", Bytes(found.nbytes)),
            ("differing", _share(found) if found.values else None),
        ],
        title="Differences" if output.format == "md" else None,
    )
    cut = None if whole else ROWS
    if found.causes:
        output.table(("likely cause: B", "tensors", "for example"), [_cause(c) for c in found.causes], title="Likely causes")
    _unlike(output, found, cut)
    if found.values:
        worst = sorted(found.values, key=lambda v: (-v.beyond, -v.max_abs))
        rows = [_value(v) for v in worst[:cut]]
        output.table(("tensor", "differing", "of", "max abs", "max rel", "max ulp", "cosine"), rows, title="Values")
        _more(output, len(worst), cut)
        _bars(output, found.histogram)


def verdict(found: Difference) -> str:
    """One line: equal, or how many differences of which kind."""
    if found.equal:
        return "equal" if not found.values else f"equal within the tolerance ({found.differing} elements differ by less)"
    kinds = (
        (len(found.only_a), "only in A"),
        (len(found.only_b), "only in B"),
        (len(found.shapes), "of another shape"),
        (len(found.dtypes), "of another dtype"),
        (sum(1 for v in found.values if v.beyond), "with other values"),
    )
    told = [f"{count} tensors {what}" if count != 1 else f"1 tensor {what}" for count, what in kinds if count]
    if found.config:
        told.append(f"{len(found.config)} settings")
    return f"different: {', '.join(told)}"


def document(found: Difference) -> dict[str, Any]:
    """Everything as plain values for JSON; infinite numbers as text."""
    return {
        "equal": found.equal,
        "a": asdict(found.a),
        "b": asdict(found.b),
        "naming": found.naming,
        "compared": {"tensors": found.tensors, "elements": found.elements, "bytes": found.nbytes},
        "only_a": [_plain(asdict(m)) for m in found.only_a],
        "only_b": [_plain(asdict(m)) for m in found.only_b],
        "shapes": [asdict(u) for u in found.shapes],
        "dtypes": [asdict(u) for u in found.dtypes],
        "config": [asdict(u) for u in found.config],
        "values": [_plain(asdict(v)) for v in found.values],
        "causes": [_plain(asdict(c)) for c in found.causes],
        "differing": found.differing,
        "histogram": {str(k): v for k, v in found.histogram.items()},
        "notes": [asdict(n) for n in found.notes],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _place(side: SideFacts) -> str:
    iteration = f", iteration {side.label}" if side.label else ""
    return f"{side.directory} ({side.format}{iteration})"


def _share(found: Difference) -> str:
    return f"{found.differing:,} elements ({100 * found.differing / max(1, found.elements):.3g}%)"


def _cause(cause: Cause) -> tuple[str, int, str]:
    sure = "" if cause.exact else "perhaps: "
    return f"{sure}{cause.text}", len(cause.tensors), cause.tensors[0]


def _unlike(output: Output, found: Difference, cut: int | None) -> None:
    for title, missing in (("Only in A", found.only_a), ("Only in B", found.only_b)):
        if missing:
            rows = [(m.name, m.dtype, m.shape, ", ".join(m.nearest)) for m in missing[:cut]]
            output.table(("tensor", "dtype", "shape", "nearest on the other side"), rows, title=title)
            _more(output, len(missing), cut)
    for title, what, unlike in (
        ("Shapes", "tensor", found.shapes),
        ("Dtypes", "tensor", found.dtypes),
        ("Settings", "setting", found.config),
    ):
        if unlike:
            output.table((what, "A", "B"), [(u.name, u.a, u.b) for u in unlike[:cut]], title=title)
            _more(output, len(unlike), cut)


def _value(values: Values) -> tuple[Any, ...]:
    cosine = None if values.cosine is None else f"{values.cosine:.6f}"
    return (values.name, values.differing, values.count, f"{values.max_abs:.3g}", f"{values.max_rel:.3g}", values.max_ulp, cosine)


def _more(output: Output, count: int, cut: int | None) -> None:
    if cut is not None and count > cut:
        output.text(f"{count - cut} more; --all lists them")


def _bars(output: Output, histogram: Mapping[int, int]) -> None:
    """How many elements differ by how much, by powers of ten."""
    if not histogram:
        return
    most = max(histogram.values())
    rows = [(f"1e{k:+03d} to 1e{k + 1:+03d}", v, "#" * max(1, round(BAR * v / most))) for k, v in filled(histogram)]
    output.table(("|A - B|", "elements", ""), rows, title="How far apart")


def filled(histogram: Mapping[int, int]) -> list[tuple[int, int]]:
    """Decades from the smallest to the largest, those between them without elements included."""
    return [(k, histogram.get(k, 0)) for k in range(min(histogram), max(histogram) + 1)] if histogram else []


def _rows_for_programs(found: Difference) -> list[Sequence[Any]]:
    """TSV is one table: the answer, then one line per difference."""
    rows: list[Sequence[Any]] = [("answer", verdict(found), found.a.directory, found.b.directory)]
    rows += [("only_a", m.name, m.dtype, m.shape) for m in found.only_a]
    rows += [("only_b", m.name, m.dtype, m.shape) for m in found.only_b]
    for kind, unlike in (("shape", found.shapes), ("dtype", found.dtypes), ("config", found.config)):
        rows += [(kind, u.name, u.a, u.b) for u in unlike]
    rows += [("values", v.name, v.differing, v.max_abs) for v in found.values]
    rows += [("cause", n, c.kind, c.text) for c in found.causes for n in c.tensors]
    return rows


def write_page(found: Difference, path: str) -> None:
    """The page of --report. CkptError E573 when it cannot be written."""
    from ..diff.page import page

    text = page(found, verdict(found), sanitize)
    try:
        with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        hint = "give a file that does not exist yet" if isinstance(error, FileExistsError) else None
        raise CkptError("E573", "the report could not be written", where=path, found=error.strerror, hint=hint) from None
    note(f"the report is in {path}")
