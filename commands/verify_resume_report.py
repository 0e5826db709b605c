"""The answer of `ckpt verify-resume`: for people, for pull requests, for programs, for CI, and as a page."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..resume.result import DIFFERS, EQUAL, NOISE, Reason, Row, Verified, facts
from .cells import sanitize
from .ci_formats import Style, TestCase, annotation, junit, write
from .output import note

WHEN = {"before": "before the save", "loaded": "as loaded", "trained": "training on"}


def show(style: Style, found: Verified, report: Path | None) -> None:
    """Write the answer, and the page where one is asked for."""
    if report is not None:
        from ..resume.page import page

        report.write_text(page(found, verdict(found), sanitize), encoding="utf-8")
        note(f"wrote {report}")
    if style.own == "github":
        write([*(annotation(r.severity, "", r.code, _reason(r)) for r in found.reasons), sanitize(f"verify-resume: {verdict(found)}")])
        return
    if style.own == "junit":
        write(junit("ckpt verify-resume", found.source, _cases(found)))
        return
    output = style.output
    output.document("verify-resume", document(found))
    if output.is_json:
        return
    for remark in found.notes:
        note(remark)
    if output.format == "tsv":
        columns = ("when", "component", "verdict", "differing", "total", "iteration", "tensor", "largest", "noise_floor")
        rows = [(r.when, r.component, r.verdict, r.differing, r.total, r.iteration, r.tensor, r.largest, r.floor) for r in found.rows]
        output.summary([("answer", verdict(found)), *((r.code, _reason(r)) for r in found.reasons)])
        output.table(columns, rows)
        return
    output.summary(
        [
            ("answer", verdict(found)),
            ("model", found.model),
            ("from", found.source),
            ("straight", f"iteration {found.start} to {found.end}, {found.layout}" if found.rows else None),
            ("resumed", _resumed(found) if found.rows else None),
        ],
        title="Resume" if output.format == "md" else None,
    )
    for reason in found.reasons:
        output.text()
        output.text(f"{reason.severity}[{reason.code}]: {reason.text}")
        for label in ("tensor", "expected", "found"):
            if value := getattr(reason, label):
                output.text(f"  {label}: {value}")
    if found.rows:
        output.table(("part", *(WHEN[w] for w in ("loaded", "trained"))), _side_by_side(found), title="Part by part")


def verdict(found: Verified) -> str:
    """One line: the run continues, exactly or within the noise, or where it begins to differ."""
    if found.missing:
        return f"NOT RESUMABLE: {', '.join(found.missing)} missing"
    if found.same:
        if found.exact:
            return f"continues exactly: {found.end - found.saved} steps after loading equal the run that never stopped, bit for bit"
        return "continues: what was loaded is equal bit for bit, and the steps after it differ no more than the two layouts do"
    first = found.first_difference
    if first is None:
        return "DOES NOT CONTINUE"
    where = f" {first.tensor}" if first.tensor else ""
    return f"DOES NOT CONTINUE: {first.component}{where} differs from iteration {first.iteration} on, {WHEN[first.when]}"


def document(found: Verified) -> dict[str, Any]:
    """Everything as plain values; infinite numbers as text."""
    whole = {
        "same": found.same,
        "exact": found.exact,
        "resumable": not found.missing,
        "missing": list(found.missing),
        "verdict": verdict(found),
        "model": found.model,
        "source": found.source,
        "iterations": {"start": found.start, "saved": found.saved, "end": found.end},
        "layout": found.layout,
        "resumed_layout": found.resumed_layout,
        "path": list(found.path),
        "reasons": [asdict(r) for r in found.reasons],
        "components": [facts(r) for r in found.rows],
        "curves": {name: [asdict(p) for p in getattr(found, name)] for name in ("straight", "resumed", "other")},
        "notes": list(found.notes),
        "seconds": round(found.seconds, 1),
    }
    return {key: _plain(value) for key, value in whole.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _resumed(found: Verified) -> str:
    path = " -> ".join((f"save at {found.saved}", *found.path, "load"))
    return f"{path}, on to {found.end}, {found.resumed_layout}"


def _reason(reason: Reason) -> str:
    more = [f"{label} {value}" for label, value in (("expected", reason.expected), ("found", reason.found)) if value]
    place = f"{reason.tensor}: " if reason.tensor else ""
    return place + reason.text + (f" ({'; '.join(more)})" if more else "")


def _side_by_side(found: Verified) -> list[tuple[str, str, str]]:
    """A line per component: as loaded, and while training on."""
    names = list(dict.fromkeys(r.component for r in found.rows))
    at = {(r.component, r.when): r for r in found.rows}
    lines = []
    for name in names:
        before = at.get((name, "before"))
        loaded, trained = at.get((name, "loaded")) or before, at.get((name, "trained"))
        lines.append((name, _told(loaded), _told(trained)))
    return lines


def _told(row: Row | None) -> str:
    if row is None:
        return ""
    if row.verdict == EQUAL:
        return f"equal, {row.total} of {row.total}" if row.total > 1 else "equal"
    if row.verdict == NOISE:
        return f"noise: {row.largest:.2g} of {row.floor:.2g}"
    if row.verdict == DIFFERS:
        many = f"{row.differing}/{row.total} " if row.total > 1 else ""
        size = f", by {row.largest:.2g}" if row.largest is not None else ""
        floor = f" (noise {row.floor:.2g})" if row.floor is not None else ""
        return f"DIFFERS {many}from {row.iteration}{size}{floor}"
    return row.verdict


def _cases(found: Verified) -> list[TestCase]:
    """One test case per component and moment; without any, one for the checkpoint."""
    if not found.rows:
        return [TestCase("training state", found.reasons[0].text if found.reasons else "", tuple(_reason(r) for r in found.reasons))]
    cases = []
    for row in found.rows:
        reasons = tuple(f"{r.code}: {_reason(r)}" for r in found.reasons if r.component == row.component)
        failure = f"{row.component}: {_told(row)}" if row.verdict == DIFFERS else ""
        cases.append(TestCase(f"{row.component}, {WHEN[row.when]}", failure, (row.compared, *reasons) if failure else ()))
    named = {row.component for row in found.rows if row.verdict == DIFFERS}
    for reason in found.reasons:
        if reason.severity == "error" and reason.component not in named:
            cases.append(TestCase(f"{reason.code} {reason.component}", reason.text, (_reason(reason),)))
    return cases
