"""What a check is and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .subject import Subject

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Problem:
    """What a check function yields. text: one sentence; where: file or folder; tensor: its name, or ""; expected, found: formatted, or "";
    severity: "" = that of the check."""

    text: str
    where: str = ""
    tensor: str = ""
    expected: str = ""
    found: str = ""
    severity: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with the code and severity of the check that found it."""

    code: str
    severity: str
    text: str
    where: str
    tensor: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Check:
    """code: V and three digits; severity: what its problems usually are; title: a few words; function: the check; deep: only with --deep
    (it reads tensors); resume: its problems are errors when the checkpoint must let training go on."""

    code: str
    severity: str
    title: str
    function: Callable[[Subject], Iterator[Problem]]
    deep: bool = False
    resume: bool = False
