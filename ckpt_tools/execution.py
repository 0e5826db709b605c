"""Carry out a plan: make the files in a staging folder with a few threads, flush them, put them in place."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .blocks import Task, make_tasks
from .engine import Worker
from .errors import CkptError
from .journal import Journal, create, take_up
from .planning import Plan, SourceFile
from .source_files import allow, open_source, opened
from .staging import Staging, overlaps

Progress = Callable[[int], None]
FLUSH_BYTES = 256 * 2**20  # the background flush runs each time this much more has been written


@dataclass(frozen=True, slots=True)
class Result:
    """What was done: bytes of the result, seconds, values that overflowed in casts, what --verify compared (bytes; None = not asked), and
    how many bytes an earlier run that was killed had already written."""

    path: str
    nbytes: int
    seconds: float
    overflow: int
    verified: int | None
    resumed: int = 0


def execute(
    plan: Plan,
    destination: str | os.PathLike[str],
    *,
    threads: int = 2,
    fsync: bool = True,
    overwrite: bool = False,
    resume: bool = False,
    on_progress: Progress | None = None,
    before_commit: Callable[[str], int] | None = None,
    in_place: bool = False,
) -> Result:
    """Make the plan's files under `destination`, which appears only when everything is written and flushed.

    threads        workers, each with one buffer of plan.buffer bytes.
    resume         take up what an earlier run of the same plan left when it was killed; and when this run is interrupted or the disk is
                   full, leave what it wrote for the next one.
    on_progress    called with the bytes written so far, from worker threads.
    in_place       the target may be the folder that is read: it is replaced when the new one is complete.
    before_commit  called with the staging folder when all is written; returns the bytes it verified or raises.
    Errors: E406 source changed, E407/E408 target occupied, E409 no space or write error. Nothing is left behind on any error.
    """
    started = time.monotonic()
    target = os.fspath(destination)
    for source in {os.path.dirname(s.path) for s in plan.sources} | {str(plan.source.get("path", ""))} - {""}:
        if not in_place and overlaps(source, target):
            raise CkptError("E407", "the target overlaps the source", where=target, found=source, hint="give a DST outside SRC")
    with Staging(target, overwrite=overwrite, resume=resume) as staging:
        tasks = make_tasks(plan.moves, plan.buffer, plan.encodings)
        journal = _journal(plan, staging, len(tasks))
        resumed = sum(tasks[number].nbytes for number in journal.done)
        staging.keep = resume
        try:
            check_space(staging.path, plan.nbytes - resumed)
            check_sources(plan.sources)
            overflow = _fill(plan, tasks, journal, staging.path, threads, fsync, on_progress or (lambda _: None))
            check_sources(plan.sources)
            verified = before_commit(staging.path) if before_commit else None
            staging.commit(sync=fsync)
        except OSError as error:
            left = "what was written is kept for --resume" if resume else "nothing was left behind"
            raise CkptError(
                "E409",
                f"writing failed: {error.strerror}",
                where=error.filename or target,
                hint=f"{left}; free space or give another DST",
            ) from None
        except CkptError as error:
            staging.keep = resume and error.code == "E409"
            raise
        finally:
            journal.close()
    return Result(target, plan.nbytes, time.monotonic() - started, overflow, verified, resumed)


def _journal(plan: Plan, staging: Staging, tasks: int) -> Journal:
    found = take_up(staging.journal, plan, tasks)
    if found is None:
        staging.discard()
        return create(staging.journal, plan)
    return found


def check_space(path: str, needed: int) -> None:
    """CkptError E409 when the filesystem has fewer free bytes than needed."""
    stat = os.statvfs(path)
    free = stat.f_bavail * stat.f_frsize
    if free < needed:
        raise CkptError(
            "E409", "not enough space for the result", where=os.path.dirname(path), expected=f"{needed} bytes", found=f"{free} bytes free"
        )


def check_sources(sources: Sequence[SourceFile]) -> None:
    """CkptError E406 when a source file is not the one that was planned."""
    for source in sources:
        try:
            stat = os.stat(source.path)
        except OSError as error:
            raise CkptError("E406", "a source file is gone", where=source.path, found=error.strerror) from None
        if (stat.st_size, stat.st_mtime_ns, stat.st_ino) != (source.size, source.mtime_ns, source.inode):
            raise CkptError(
                "E406", "a source file changed while it was read", where=source.path, hint="wait until nobody writes to SRC and run again"
            )


def _fill(
    plan: Plan, tasks: Sequence[Task], journal: Journal, folder: str, threads: int, fsync: bool, on_progress: Progress
) -> int:
    for copied in plan.copies:
        full = os.path.join(folder, copied.target)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with opened(copied.source) as source_file, open(full, "wb") as target_file:
            shutil.copyfileobj(source_file, target_file)
    allow(len(plan.sources) + len(plan.targets))
    targets = [_create(folder, t.path, t.size, t.literals) for t in plan.targets]
    sources: list[int] = []
    try:
        for source in plan.sources:
            sources.append(open_source(source.path))
        names = [s.path for s in plan.sources]
        with _Flusher(targets, fsync, journal) as flusher:
            overflow = run_tasks(
                tasks,
                lambda: Worker(plan.buffer, sources, targets, names),
                threads,
                flusher.watch(on_progress),
                journal=journal,
            )
        if fsync:
            _sync(targets, [os.path.join(folder, c.target) for c in plan.copies])
    finally:
        for fd in (*sources, *targets):
            os.close(fd)
    return overflow


def _create(folder: str, path: str, size: int, literals: Sequence[tuple[int, bytes]]) -> int:
    full = os.path.join(folder, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    fd = os.open(full, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    os.ftruncate(fd, size)
    for offset, data in literals:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)
    return fd


class _Flusher:
    """Flushes the target files in the background while they are being written, so that the final fsync has little left to do, and
    tells the journal what is on disk."""

    def __init__(self, targets: Sequence[int], enabled: bool, journal: Journal) -> None:
        self._targets, self._enabled, self._journal = targets, enabled, journal
        self._wake, self._stop = threading.Event(), False
        self._flushed = 0
        self._thread = threading.Thread(target=self._run, name="ckpt-flush", daemon=True)

    def __enter__(self) -> _Flusher:
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._wake.set()
        if self._enabled:
            self._thread.join()

    def watch(self, on_progress: Progress) -> Progress:
        """on_progress that also wakes the flusher each FLUSH_BYTES."""

        def progress(done: int) -> None:
            if done - self._flushed >= FLUSH_BYTES:
                self._flushed = done
                self._wake.set()
            on_progress(done)

        return progress

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stop:
                return
            position = self._journal.position()
            try:
                for fd in self._targets:
                    os.fdatasync(fd)
                self._journal.synced(position)
            except OSError:  # reported by the final fsync; the journal then promises nothing
                return


def _sync(targets: Sequence[int], paths: Sequence[str]) -> None:
    for fd in targets:
        os.fsync(fd)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def run_tasks(
    tasks: Sequence[Task], make_worker: Callable[[], Worker], threads: int, on_progress: Progress, journal: Journal | None = None
) -> int:
    """Run all tasks on `threads` workers; the first error stops the others and is raised. Returns the overflow count.

    journal: tasks it has as done are not run again, each one that ends is recorded.
    """
    earlier = journal.done if journal else {}
    queue = deque((number, task) for number, task in enumerate(tasks) if number not in earlier)
    errors: list[BaseException] = []
    workers: list[Worker] = []
    lock, stop, done = threading.Lock(), threading.Event(), sum(tasks[number].nbytes for number in earlier)

    def work() -> None:
        nonlocal done
        try:
            worker = make_worker()
            workers.append(worker)
            while not stop.is_set():
                try:
                    number, task = queue.popleft()
                except IndexError:
                    return
                before = worker.overflow
                worker.run(task)
                if journal:
                    journal.record(number, worker.overflow - before)
                with lock:
                    done += task.nbytes
                    on_progress(done)
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread, whatever it is
            errors.append(error)
            stop.set()

    pool = [threading.Thread(target=work, name=f"ckpt-{i}", daemon=True) for i in range(max(1, min(threads, len(queue))))]
    for thread in pool:
        thread.start()
    try:
        for thread in pool:
            while thread.is_alive():
                thread.join(0.2)
    except BaseException:  # Ctrl-C arrives here: let the workers finish their block, then go
        stop.set()
        for thread in pool:
            thread.join()
        raise
    if errors:
        raise errors[0]
    return sum(w.overflow for w in workers) + sum(earlier.values())
