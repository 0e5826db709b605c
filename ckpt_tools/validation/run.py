"""Run the checks on one checkpoint: what `ckpt validate` answers, as data.

report = validate("runs/llama", deep=True)
report.valid, report.findings
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CkptError, nearest
from ..statistics import adding_up
from .files import problem_of
from .finding import SEVERITIES, Check, Finding, Problem
from .holdings import Holdings, holdings
from .subject import Subject
from .table import BY_CODE, CHECKS


@dataclass(frozen=True, slots=True)
class Options:
    """iteration  as for open_checkpoint;   deep  read tensors too;   strict  warnings count;   resume  training must be able to go on.
    select, ignore  codes or their beginnings ("V2", "V301"); select () = all;   family, threads."""

    iteration: str | int = "latest"
    deep: bool = False
    strict: bool = False
    resume: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    family: str | None = None
    threads: int = 2


@dataclass(frozen=True, slots=True)
class Report:
    """The answer. given, directory, format, iteration, chosen: what was validated;   holds: what lies where;
    findings  errors first;   checked, skipped  codes of the checks that ran, and of those that only --deep runs or that were not asked for.
    """

    given: str
    directory: str
    format: str | None
    iteration: str | None
    chosen: str | None
    holds: Holdings | None
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    skipped: tuple[str, ...]
    strict: bool

    def count(self, severity: str) -> int:
        """Findings of one severity."""
        return sum(f.severity == severity for f in self.findings)

    @property
    def valid(self) -> bool:
        """No errors, and with strict no warnings."""
        return not self.count("error") and not (self.strict and self.count("warning"))


def validate(path: str | os.PathLike[str], options: Options | None = None) -> Report:
    """Run every check that applies. Errors: E105, E106, E107, E901 when there is nothing to validate; E580 for codes that do not exist."""
    options = options or Options()
    return examine(look_at(path, options), options)


def look_at(path: str | os.PathLike[str], options: Options) -> Subject:
    """The checkpoint, its headers and indexes read as far as they can be. Errors as validate."""
    _chosen(options)
    subject = Subject(
        os.fspath(path), options.iteration, deep=options.deep, resume=options.resume, threads=options.threads, family=options.family
    )
    subject.look_everywhere()
    return subject


def examine(subject: Subject, options: Options, on_progress: Callable[[int], None] | None = None) -> Report:
    """Run the checks. on_progress gets the bytes of tensors whose values were looked at, of subject.nbytes."""
    subject.on_progress = adding_up(on_progress)
    chosen = _chosen(options)
    findings: list[Finding] = []
    checked = []
    for check in chosen:
        if check.deep and not options.deep:
            continue
        checked.append(check.code)
        findings += _run(check, subject, options)
    if not any(f.severity == "error" for f in findings) and (lost := _not_opened(subject)) is not None:
        findings.append(_finding(BY_CODE["V199"], lost, options))
    findings.sort(key=lambda f: SEVERITIES.index(f.severity))
    place = subject.location
    return Report(
        subject.given,
        subject.directory,
        place.format if place else None,
        place.label if place else None,
        place.chosen if place else None,
        holdings(subject),
        tuple(dict.fromkeys(findings)),
        tuple(checked),
        tuple(c.code for c in CHECKS if c.code not in checked),
        options.strict,
    )


def _chosen(options: Options) -> list[Check]:
    for code in (*options.select, *options.ignore):
        if not any(c.code.startswith(code) for c in CHECKS):
            near = nearest(code, BY_CODE)
            raise CkptError(
                "E580", f"no check has a code that begins with {code!r}", expected="V2, V301, ...", hint=", ".join(near) or None
            )
    return [
        c
        for c in CHECKS
        if (not options.select or c.code.startswith(options.select)) and not (options.ignore and c.code.startswith(options.ignore))
    ]


def _run(check: Check, subject: Subject, options: Options) -> list[Finding]:
    try:
        return [_finding(check, problem, options) for problem in check.function(subject)]
    except OSError as error:  # a file that went away or cannot be read
        where = str(error.filename or subject.directory)
        return [_finding(BY_CODE["V199"], Problem(f"{check.title}: {error.strerror or error}", where), options)]
    except CkptError as error:  # a file that broke while it was read: another check's business, but never silence
        problem = problem_of(error)
        return [
            _finding(
                BY_CODE["V199"],
                Problem(f"{check.title}: {error.what}", problem.where, problem.tensor, problem.expected, problem.found),
                options,
            )
        ]


def _finding(check: Check, problem: Problem, options: Options) -> Finding:
    severity = problem.severity or check.severity
    if options.resume and check.resume:
        severity = "error"
    return Finding(check.code, severity, problem.text, problem.where, problem.tensor, problem.expected, problem.found)


def _not_opened(subject: Subject) -> Problem | None:
    """A problem when what should have been looked at was not, whatever the reason."""
    place = subject.location
    if place is None:
        return Problem("no checkpoint could be chosen here", subject.given)
    if place.format == "peft":
        return (
            None if subject.headers else Problem("the adapter's weights could not be opened (only safetensors are read)", place.directory)
        )
    if place.format == "hf":
        return None if subject.hf is not None else Problem("the weights could not be opened", place.directory)
    return None if subject.state is not None else Problem("the iteration could not be opened", place.directory)


def codes_of(text: str | None) -> tuple[str, ...]:
    """Codes from "V2,v301": upper case, blanks dropped."""
    return tuple(word.strip().upper() for word in (text or "").split(",") if word.strip())
