"""The views of `ckpt inspect`: which are wanted, and each as a table and as part of the JSON answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CkptError
from ..inspection.overview import Inspection, Opened, arguments, inspect
from ..inspection.tensors import Entry, Group, entries, group, matches, select
from ..tensors import TensorMetadata
from .cells import human
from .inspect_ranks import layout_map, rank_table, write_svg
from .inspect_summary import document, flat, people, plain_fields
from .inspect_tree import tree_lines, tree_rows
from .output import Bytes, Output, note, warn

if TYPE_CHECKING:
    from ..inspection.ranks import Shares

GROUPINGS = ("module", "dtype", "file", "rank")
VALUE_LIMIT = 300  # characters of an argument that are shown


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for on the command line."""

    pattern: str | None
    tensors: bool
    layers: bool
    by: str | None
    stats: bool
    args: bool
    fingerprint: bool
    threads: int
    progress: bool
    map: bool
    svg: Path | None
    sizes: Mapping[str, Any]  # of a layout, as target_layout takes them; None = the checkpoint's own

    @property
    def views(self) -> tuple[str, ...]:
        """The views asked for, in the order in which they are shown; empty = the summary. A pattern alone asks for a listing."""
        drawn = self.map or self.svg is not None
        named = [("args", self.args), ("by", self.by is not None), ("map", drawn)]
        named += [("stats", self.stats), ("fingerprint", self.fingerprint)]
        found = [name for name, wanted in named if wanted]
        if (self.tensors or self.layers or (self.pattern and not found)) and "stats" not in found:
            found.insert(0, "tensors")
        return tuple(found)


def check_views(wanted: Request, output: Output) -> None:
    """CkptError E001 for a request that makes no sense, before anything is opened."""
    if wanted.by is not None and wanted.by not in GROUPINGS:
        raise CkptError("E001", f"tensors cannot be grouped by {wanted.by!r}", expected=", ".join(GROUPINGS))
    if any(v is not None for v in wanted.sizes.values()) and not (wanted.by == "rank" or "map" in wanted.views):
        raise CkptError("E001", "a layout is for --by rank, --layout-map and --svg", hint="`ckpt reshard` writes for another layout")
    if output.format == "tsv" and len(wanted.views) > 1:
        raise CkptError("E001", "a TSV answer holds one table", found=", ".join(wanted.views), hint="ask for one of them, or add --json")


def show(output: Output, wanted: Request, opened: Opened) -> None:
    """Write the answer: the views asked for, or else the summary; JSON always has the summary too."""
    answer: dict[str, Any] = {}
    if output.is_json:
        answer = document(inspect(opened))
    elif wanted.views:
        for text in opened.state.warnings:
            warn(text)
    else:
        _summary(output, inspect(opened))
    for view in wanted.views:
        answer |= _VIEWS[view](output, wanted, opened)
    output.document("inspect", answer)


def _summary(output: Output, found: Inspection) -> None:
    for text in found.warnings:
        warn(text)
    if output.format == "tsv":
        output.summary(flat({k: v for k, v in document(found).items() if k != "tree"}))
        return
    output.summary(people(found, wrapped=output.format == "table"))
    if not found.kinds:
        return
    if output.format == "md":
        output.table(("tensor", "dtype", "shape", "count", "size"), tree_rows(found.kinds), title="Tensors")
    else:
        output.text()
        for line in tree_lines(found.kinds):
            output.text(line)


def _chosen(wanted: Request, opened: Opened) -> list[tuple[dict[str, TensorMetadata], bool]]:
    """(tensors that match, whether they have HF names): weights, then optimizer state."""
    weights, hf = opened.of_weights()
    parts = [(weights, hf), (opened.of_optimizer(), False)]
    return [(select(tensors, wanted.pattern, hf=named), named) for tensors, named in parts]


def _tensors(output: Output, wanted: Request, opened: Opened) -> dict[str, Any]:
    listed: list[Entry] = []
    for tensors, hf in _chosen(wanted, opened):
        listed += entries(tensors, wanted.pattern if wanted.layers else None, hf=hf, layers=wanted.layers)
    if output.is_json:
        return {"tensors": [plain_fields(e) for e in listed]}
    rows = ((e.name, e.dtype, e.shape, Bytes(e.nbytes), e.pieces, _files(output, e.files)) for e in listed)
    _listing(output, ("name", "dtype", "shape", "bytes", "pieces", "files"), rows)
    return {}


def _listing(output: Output, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """A table whose names are never broken: for people plain aligned text, so that one can be found, selected and searched for."""
    if output.format != "table":
        output.table(columns, rows, title=title)
        return
    cells = list(rows)
    right = [bool(cells) and all(r[i] is None or isinstance(r[i], int | float) for r in cells) for i in range(len(columns))]
    texts = [columns, *([f"{v:.4g}" if isinstance(v, float) else human(v) for v in row] for row in cells)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(columns))]
    if title:
        output.text(title)
    for row in texts:
        output.text("  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip())


def _files(output: Output, names: Sequence[str]) -> str:
    if output.format == "tsv" or len(names) < 3:
        return ",".join(names)
    return f"{names[0]} and {len(names) - 1} more"


def _by(output: Output, wanted: Request, opened: Opened) -> dict[str, Any]:
    how = wanted.by or "module"
    if how == "rank":
        return rank_table(output, _shares(wanted, opened))
    groups = [g for tensors, hf in _chosen(wanted, opened) for g in group(tensors, how, hf=hf)]
    if how != "module":
        groups = _joined(groups)
    if output.is_json:
        return {"by": {"key": how, "groups": [plain_fields(g) for g in groups]}}
    what = "pieces" if how == "file" else "tensors"
    if how == "file":
        sizes = ((g.name, g.tensors, g.parameters, Bytes(g.nbytes), None if g.file_size is None else Bytes(g.file_size)) for g in groups)
        _listing(output, (how, what, "elements", "bytes", "file_size"), sizes)
    else:
        _listing(output, (how, what, "elements", "bytes"), ((g.name, g.tensors, g.parameters, Bytes(g.nbytes)) for g in groups))
    return {}


def _map(output: Output, wanted: Request, opened: Opened) -> dict[str, Any]:
    shares = _shares(wanted, opened)
    if wanted.svg is not None:
        write_svg(wanted.svg, shares)
        note(f"drawn in {wanted.svg}")
    return layout_map(output, shares) if wanted.map or output.is_json else {}


def _shares(wanted: Request, opened: Opened) -> Shares:
    from ..inspection.ranks import rank_shares
    from .layout_options import target_layout

    own = all(v is None for v in wanted.sizes.values())
    shares = rank_shares(opened, target_layout(opened.state, **wanted.sizes), as_stored=own, pattern=wanted.pattern)
    for text in shares.warnings:
        warn(text)
    return shares


def _joined(groups: Sequence[Group]) -> list[Group]:
    found: dict[str, Group] = {}
    for g in groups:
        known = found.get(g.name)
        if known is not None:
            g = replace(g, tensors=g.tensors + known.tensors, parameters=g.parameters + known.parameters, nbytes=g.nbytes + known.nbytes)
        found[g.name] = g
    return list(found.values())


def _stats(output: Output, wanted: Request, opened: Opened) -> dict[str, Any]:
    from ..inspection.tensors import located
    from ..statistics import statistics
    from .progress import progress

    chosen: dict[str, TensorMetadata] = {}
    for (tensors, hf), checkpoint in zip(_chosen(wanted, opened), (opened.model, opened.state), strict=True):
        chosen |= located(checkpoint, tensors, wanted.pattern if wanted.layers else None, hf=hf, layers=wanted.layers)
    total = sum(t.nbytes for t in chosen.values())
    with progress(total, "reading", wanted.progress) as on_progress:
        results = list(statistics(chosen, threads=wanted.threads, on_progress=on_progress))
    if output.is_json:
        named = ((n, chosen[n], s) for n, s in results)
        return {"stats": [{"name": n, "dtype": t.dtype, "shape": list(t.global_shape), **plain_fields(s)} for n, t, s in named]}
    rows = ((n, chosen[n].dtype, chosen[n].global_shape, s.minimum, s.maximum, s.mean, s.nans, s.infinities, s.zeros) for n, s in results)
    _listing(output, ("name", "dtype", "shape", "min", "max", "mean", "nan", "inf", "zeros"), rows)
    return {}


def _args(output: Output, wanted: Request, opened: Opened) -> dict[str, Any]:
    source, values = arguments(opened)
    values = {str(k): v for k, v in values.items() if matches(str(k), wanted.pattern)}
    if output.is_json:
        return {"args": {"source": source, "values": {k: _jsonable(v) for k, v in values.items()}}}
    rows = ((k, _brief(v)) for k, v in sorted(values.items()))
    _listing(output, ("name", "value"), rows, title="Megatron's arguments" if source == "args" else source)
    return {}


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= VALUE_LIMIT else f"{text[: VALUE_LIMIT - 3]}..."


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else repr(value)
    if type(value) in (list, tuple):
        return [_jsonable(v) for v in value]
    if type(value) is dict:
        return {str(k): _jsonable(v) for k, v in value.items()}
    return _brief(value)


def _fingerprint(output: Output, wanted: Request, opened: Opened) -> dict[str, Any]:
    from ..inspection.fingerprint import fingerprint
    from .progress import progress

    with progress(sum(t.nbytes for t in opened.of_weights()[0].values()), "hashing", wanted.progress) as on_progress:
        found = fingerprint(opened, threads=wanted.threads, on_progress=on_progress)
    output.summary(
        [
            ("fingerprint", f"sha256:{found.sha256}"),
            ("naming", found.naming),
            ("computed", found.why),
            ("tensors", len(found.tensors)),
            ("bytes", Bytes(found.nbytes)),
        ]
    )
    return {"fingerprint": plain_fields(found)}


_VIEWS = {"tensors": _tensors, "args": _args, "by": _by, "map": _map, "stats": _stats, "fingerprint": _fingerprint}
