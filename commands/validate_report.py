"""The answer of `ckpt validate`: table, TSV, JSON, Markdown, GitHub annotations, JUnit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..validation.finding import Finding
from ..validation.mend import Mend
from ..validation.run import Report
from ..validation.table import BY_CODE
from .cells import sanitize
from .ci_formats import Style, TestCase, annotation, junit, write
from .output import note, warn


def show(style: Style, report: Report, mended: Sequence[str]) -> None:
    """Write the answer."""
    if style.own == "github":
        write([_annotation(f) for f in report.findings] + [sanitize(f"{report.given}: {verdict(report)}")])
        return
    if style.own == "junit":
        write(junit("ckpt validate", report.given, _cases(report)))
        return
    output = style.output
    output.document("validate", document(report, mended))
    if output.is_json:
        return
    if output.format == "tsv":
        output.table(("severity", "code", "where", "tensor", "text", "expected", "found"), [_row(f) for f in report.findings])
        return
    holds = report.holds
    output.summary(
        [
            ("answer", verdict(report)),
            ("checkpoint", report.directory),
            ("format", report.format),
            ("iteration", f"{report.iteration} ({report.chosen})" if report.iteration else None),
            ("family", holds.family or None if holds else None),
            ("weights", holds.weights if holds else None),
            ("optimizer", holds.optimizer if holds and report.format != "hf" else None),
            ("training state", _state(report)),
            ("checks", f"{len(report.checked)} run" + (f", {_left(report)} more with --deep" if _left(report) else "")),
        ],
        title="Validation" if output.format == "md" else None,
    )
    if output.format == "md":
        rows = [(f.severity, f.code, _place(f), _text(f)) for f in report.findings]
        if rows:
            output.table(("", "code", "where", "what"), rows, title="Findings")
        return
    for finding in report.findings:
        output.text()
        output.text(f"{finding.severity}[{finding.code}]: {finding.text}")
        for label in ("where", "tensor", "expected", "found"):
            value = getattr(finding, label)
            if value:
                output.text(f"  {label}: {value}")


def show_mends(mends: Sequence[Mend], refused: Sequence[str]) -> None:
    """The plan of --fix on stderr, before anything is written."""
    for mend in mends:
        note(f"{', '.join(mend.codes)}: write {mend.path}: {mend.before} -> {mend.after}")
    for text in refused:
        warn(text)
    if not mends and not refused:
        note("nothing that --fix can mend")


def verdict(report: Report) -> str:
    """One line: valid or not, and how many findings of each kind."""
    counts = [f"{report.count(s)} {s}{'s' if report.count(s) != 1 else ''}" for s in ("error", "warning") if report.count(s)]
    return ("valid" if report.valid else "not valid") + (f" ({', '.join(counts)})" if counts else "")


def document(report: Report, mended: Sequence[str]) -> dict[str, Any]:
    """Everything as plain values."""
    return {
        "valid": report.valid,
        "given": report.given,
        "directory": report.directory,
        "format": report.format,
        "iteration": report.iteration,
        "chosen": report.chosen,
        "holds": asdict(report.holds) if report.holds else None,
        "counts": {s: report.count(s) for s in ("error", "warning", "info")},
        "findings": [asdict(f) for f in report.findings],
        "checked": list(report.checked),
        "skipped": list(report.skipped),
        "mended": list(mended),
    }


def _left(report: Report) -> int:
    return sum(BY_CODE[code].deep for code in report.skipped)


def _state(report: Report) -> str | None:
    if report.holds is None or report.format == "hf":
        return None
    parts = [name for name, there in (("scheduler", report.holds.scheduler), ("random states", report.holds.random)) if there]
    return ", ".join(parts) or "none"


def _row(finding: Finding) -> tuple[str, ...]:
    return finding.severity, finding.code, finding.where, finding.tensor, finding.text, finding.expected, finding.found


def _place(finding: Finding) -> str:
    return f"{finding.where}: {finding.tensor}" if finding.tensor else finding.where


def _text(finding: Finding) -> str:
    more = [f"{label} {value}" for label, value in (("expected", finding.expected), ("found", finding.found)) if value]
    return finding.text + (f" ({'; '.join(more)})" if more else "")


def _annotation(finding: Finding) -> str:
    message = f"{finding.tensor}: {_text(finding)}" if finding.tensor else _text(finding)
    return annotation(finding.severity, finding.where, finding.code, message)


def _cases(report: Report) -> list[TestCase]:
    """One test case per check that ran; a finding that counts is a failure, any other goes to its output."""
    counted = ("error", "warning") if report.strict else ("error",)
    cases = []
    extra = {f.code for f in report.findings} - set(report.checked)
    for code in (*report.checked, *sorted(extra)):
        found = [f for f in report.findings if f.code == code]
        bad = [f for f in found if f.severity in counted]
        lines = tuple(f"{_place(f)}: {_text(f)}" for f in bad or found)
        cases.append(TestCase(f"{code} {BY_CODE[code].title}", bad[0].text if bad else "", lines))
    return cases
