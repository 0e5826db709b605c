"""Progress on stderr: bytes, speed, time left. A live line on a terminal, at most one line per ten seconds elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .cells import human_bytes, sanitize

PATIENCE = 0.4  # seconds before anything is shown: short jobs stay silent and never import rich
REDRAW = 0.1
LOG_EVERY = 10.0  # seconds between lines when stderr is not a terminal


@contextmanager
def progress(total_bytes: int, label: str, enabled: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes done so far, from any thread, as often as one likes.

    Counts may arrive out of order: the largest is shown. Between redraws a call costs a comparison and a clock read.
    """
    if not enabled:
        yield lambda _: None
        return
    redrawn = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"  # a dumb terminal cannot take a line back
    show = _Live(total_bytes, label) if redrawn else _Lines(total_bytes, label)
    meter = _Meter(show)
    try:
        yield meter.advance
    finally:
        meter.close()


class _Meter:
    """Passes the largest count on to a display, no more often than the display wants and by one thread at a time."""

    def __init__(self, show: _Live | _Lines) -> None:
        self._show = show
        self._done = 0
        self._next = time.monotonic() + show.first
        self._lock = threading.Lock()

    def advance(self, done: int) -> None:
        if done > self._done:
            self._done = done
        now = time.monotonic()
        if now >= self._next and self._lock.acquire(blocking=False):
            try:
                self._next = now + self._show.every
                self._show.draw(self._done)
            finally:
                self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._next = float("inf")
            self._show.close(self._done)


class _Lines:
    """Plain lines for logs."""

    first = every = LOG_EVERY

    def __init__(self, total: int, label: str) -> None:
        self._total, self._label, self._start = total, label, time.monotonic()

    def draw(self, done: int) -> None:
        sys.stderr.write(describe(done, self._total, time.monotonic() - self._start, self._label) + "\n")
        sys.stderr.flush()

    def close(self, done: int) -> None:
        """Nothing: the result says how much was done."""


class _Live:
    """One line that rich redraws; it is gone when the work is done."""

    first, every = PATIENCE, REDRAW

    def __init__(self, total: int, label: str) -> None:
        self._total, self._label, self._start = total, label, time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def draw(self, done: int) -> None:
        if self._bar is None:
            self._open()
        figures = describe(done, self._total, time.monotonic() - self._start, "")
        self._bar.update(self._task, completed=done, figures=figures)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
        texts = [TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[figures]")]
        columns = (texts[0], BarColumn(bar_width=30), texts[1])
        self._bar = Progress(
            *columns, console=console, transient=True, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False
        )  # stdout is the answer, not to be touched
        self._task = self._bar.add_task(sanitize(self._label), total=self._total, figures="")
        self._bar.start()

    def close(self, done: int) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(done: int, total: int, seconds: float, label: str) -> str:
    """Such as "converting: 45%, 12.3 GB of 27.1 GB, 2.31 GB/s, ETA 0:06"."""
    share = f"{min(100, 100 * done // total)}%, " if total else ""
    speed = done / seconds if seconds > 0 else 0.0
    left = f", ETA {_clock((total - done) / speed)}" if speed > 0 and done < total else ""
    head = f"{sanitize(label)}: " if label else ""
    return f"{head}{share}{human_bytes(done)} of {human_bytes(total)}, {human_bytes(int(speed))}/s{left}"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Stages:
    """What is happening now and how many steps of it are done, for work that is counted in steps rather than bytes.

    A live line on a terminal; elsewhere one line per stage. Use as a context manager.
    """

    def __init__(self, enabled: bool, total: int) -> None:
        self._enabled, self._total, self._done = enabled, total, 0
        self._live = enabled and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._start = time.monotonic()
        self._label = ""
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, label: str) -> None:
        """Something else begins."""
        self._label = sanitize(label)
        if self._live:
            self._draw("")
        elif self._enabled:
            sys.stderr.write(f"{time.monotonic() - self._start:.0f} s: {self._label}\n")
            sys.stderr.flush()

    def step(self, label: str) -> None:
        """One step of it is done."""
        self._done += 1
        if self._live:
            self._draw(sanitize(label))

    def _draw(self, figures: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
            texts = [TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[figures]")]
            self._bar = Progress(
                texts[0],
                BarColumn(bar_width=30),
                TimeElapsedColumn(),
                texts[1],
                console=console,
                transient=True,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(self._label, total=self._total, figures="")
            self._bar.start()
        self._bar.update(self._task, description=self._label, completed=self._done, figures=figures)
