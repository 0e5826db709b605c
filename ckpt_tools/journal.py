"""What a run has already written, kept beside its temporary folder, so that a run that was killed can be taken up where it ended.

One line per event, appended as it happens: the plan it belongs to, `done` task by task, `synced` when everything before it is on disk.
A record counts when its bytes cannot have been lost: always while the machine has not restarted, else only what was synced.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from .planning import Plan

SCHEMA = "ckpt.journal/1"


def digest(plan: Plan) -> str:
    """What must be the same for a run to be taken up: sources as they look, files to make, moves, buffer. Notes do not matter."""
    found = hashlib.sha256(SCHEMA.encode())
    for part in (plan.sources, plan.targets, plan.copies, plan.moves, plan.buffer, plan.encodings):
        found.update(repr(part).encode())
    return found.hexdigest()


def boot() -> str:
    """Names the time since the machine was started; "" where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return ""


@dataclass(slots=True)
class Journal:
    """An open journal. done: tasks (by number in the plan's order) that need not be run again -> values that overflowed in them."""

    done: Mapping[int, int]
    _file: int
    _written: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, task: int, overflow: int) -> None:
        """A task's bytes have all been given to the operating system."""
        with self._lock:
            os.write(self._file, f"done {task} {overflow}\n".encode())
            self._written += 1

    def position(self) -> int:
        """How many records there are now: to be passed to `synced` after a flush of the files that began later."""
        with self._lock:
            return self._written

    def synced(self, position: int) -> None:
        """The bytes of the first `position` records are on disk."""
        with self._lock:
            os.write(self._file, f"synced {position}\n".encode())
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close it; the file stays."""
        os.close(self._file)


def create(path: str, plan: Plan) -> Journal:
    """A new, empty journal."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    os.write(file, (json.dumps({"schema": SCHEMA, "plan": digest(plan), "boot": boot()}) + "\n").encode())
    return Journal({}, file)


def take_up(path: str, plan: Plan, tasks: int) -> Journal | None:
    """The journal that an earlier run of the same plan left; None when there is none, or it is another plan's or unreadable."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            lines = file.read(64 * tasks + 2**20).split("\n")[:-1]  # the last, if it has no end, was cut off
        head = json.loads(lines[0]) if lines else None
    except (OSError, ValueError):
        return None
    if not isinstance(head, dict) or head.get("schema") != SCHEMA or head.get("plan") != digest(plan):
        return None
    records, certain = _records(lines[1:], tasks)
    if head.get("boot") != boot() or not boot():
        records = records[:certain]
    file_number = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    journal = Journal(dict(records), file_number)
    os.write(file_number, (json.dumps({**head, "boot": boot()}) + "\n").encode())
    for task, overflow in records:
        journal.record(task, overflow)
    if certain:
        journal.synced(min(certain, len(records)))
    return journal


def _records(lines: list[str], tasks: int) -> tuple[list[tuple[int, int]], int]:
    """Well-formed `done` records in order, and how many of them are surely on disk; what follows a malformed line is not trusted."""
    records: list[tuple[int, int]] = []
    certain = 0
    for line in lines:
        words = line.split(" ")
        if not all(w.isdigit() for w in words[1:]):
            break
        if words[0] == "done" and len(words) == 3 and int(words[1]) < tasks:
            records.append((int(words[1]), int(words[2])))
        elif words[0] == "synced" and len(words) == 2 and int(words[1]) <= len(records):
            certain = int(words[1])
        else:
            break
    return records, certain
