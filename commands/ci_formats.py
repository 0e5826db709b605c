"""Answers for continuous integration: annotations of GitHub Actions, test reports in JUnit's XML."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from ..errors import CkptError
from .cells import sanitize
from .output import FORMATS, Output

OWN = ("github", "junit")
LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


class Style:
    """The format asked for: one of Output's or one of these. CkptError E001 for one that there is not."""

    def __init__(self, format: str) -> None:
        if format not in (*FORMATS, *OWN):
            raise CkptError("E001", "there is no such output format", found=repr(format), expected=", ".join((*FORMATS, *OWN)))
        self.own = format if format in OWN else None
        self.output = Output("auto" if self.own else format)


def annotation(severity: str, place: str, title: str, message: str) -> str:
    """A workflow command of GitHub Actions; its own escapes, so that no text from a file can begin another command."""

    def data(text: str) -> str:
        return sanitize(text).replace("%", "%25")

    def property(text: str) -> str:
        return data(text).replace(":", "%3A").replace(",", "%2C")

    where = f"file={property(place)}," if place else ""
    return f"::{LEVELS[severity]} {where}title={property(title)}::{data(message)}"


@dataclass(frozen=True, slots=True)
class TestCase:
    """name: of the case;   failure: first line of why it failed, "" when it did not;   lines: more about it."""

    name: str
    failure: str = ""
    lines: tuple[str, ...] = ()


def junit(suite: str, group: str, cases: Sequence[TestCase]) -> list[str]:
    """A JUnit report, line by line. suite: what ran; group: what it ran on."""
    made = []
    for case in cases:
        head = f"  <testcase classname={quoteattr(sanitize(group))} name={quoteattr(sanitize(case.name))}"
        text = "\n".join(escape(sanitize(line)) for line in case.lines)
        if case.failure:
            made.append(f"{head}><failure message={quoteattr(sanitize(case.failure))}>{text}</failure></testcase>")
        else:
            made.append(f"{head}><system-out>{text}</system-out></testcase>" if case.lines else f"{head}/>")
    failures = sum(bool(case.failure) for case in cases)
    begin = f"<testsuite name={quoteattr(suite)} tests=\"{len(cases)}\" failures=\"{failures}\">"
    return ['<?xml version="1.0" encoding="UTF-8"?>', begin, *made, "</testsuite>"]


def write(lines: Iterable[str]) -> None:
    """The answer, line by line."""
    sys.stdout.write("\n".join(lines) + "\n")
