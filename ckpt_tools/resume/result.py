"""What the experiment found: pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EQUAL, NOISE, DIFFERS, SKIPPED = "equal", "noise", "differs", "not compared"


@dataclass(frozen=True, slots=True)
class Row:
    """One component of a run, compared.

    when      "loaded" (before the first step after loading) or "trained" (after each step).
    verdict   "equal" (every bit), "noise" (no farther apart than two straight runs in the two layouts), "differs", "not compared".
    compared  what was compared, in words;   iteration, tensor: where the first difference is (None, "" without one);
    differing, total   how many things differ of how many;   largest: the largest difference (None: not numbers);   floor: what it may be.
    """

    component: str
    when: str
    verdict: str
    compared: str
    iteration: int | None = None
    tensor: str = ""
    differing: int = 0
    total: int = 0
    largest: float | None = None
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the resumed run is another one. code: R and three digits; component: the row it explains; text: one sentence."""

    code: str
    component: str
    text: str
    tensor: str = ""
    expected: str = ""
    found: str = ""
    severity: str = "error"


@dataclass(frozen=True, slots=True)
class Point:
    """One step of a run, for the curves."""

    iteration: int
    loss: float | None
    grad_norm: float | None
    lr: float | None


@dataclass(frozen=True, slots=True)
class Verified:
    """The answer.

    model, source   what was trained and from where;   start, saved, end: iterations;   layout, resumed_layout: in words;   path: stages.
    exact           whether the layout stayed, so that every bit is compared throughout;   reasons: most important first.
    straight, resumed, other   the courses of the runs; other: the straight run in the second layout, or ().
    """

    model: str
    source: str
    start: int
    saved: int
    end: int
    layout: str
    resumed_layout: str
    path: tuple[str, ...]
    exact: bool
    rows: tuple[Row, ...]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    straight: tuple[Point, ...] = ()
    resumed: tuple[Point, ...] = ()
    other: tuple[Point, ...] = ()
    missing: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def same(self) -> bool:
        """Whether the resumed run is the one that never stopped."""
        return not self.missing and not any(r.severity == "error" for r in self.reasons) and all(r.verdict != DIFFERS for r in self.rows)

    @property
    def first_difference(self) -> Row | None:
        """The earliest row that differs."""
        rows = [r for r in self.rows if r.verdict == DIFFERS]
        return min(rows, key=lambda r: (r.iteration if r.iteration is not None else 0, r.when != "loaded"), default=None)


def facts(row: Row) -> dict[str, Any]:
    """A row as JSON has it."""
    return {
        "component": row.component,
        "when": row.when,
        "verdict": row.verdict,
        "compared": row.compared,
        "iteration": row.iteration,
        "tensor": row.tensor or None,
        "differing": row.differing,
        "total": row.total,
        "largest": row.largest,
        "noise_floor": row.floor,
    }
