"""What convert and reshard tell: the plan before, the result after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .output import Bytes, Output, note, warn

if TYPE_CHECKING:
    from ..execution import Result
    from ..notes import Note
    from ..planning import Plan

SHOWN = 3  # notes with more names than this list the first ones and the count


def report_plan(output: Output, plan: Plan, target: str, command: str, *, threads: int) -> None:
    """The plan on stdout: what is read and made, files, every cast, padding, cut and dropped thing."""
    output.document(command, {**_document(plan, target), "dry_run": True})
    output.summary([*_pairs(plan, target), ("peak memory", Bytes(peak_memory(plan, threads)))])
    output.table(
        ["file", "bytes"], [(t.path, Bytes(t.size)) for t in plan.targets] + [(c.target, Bytes(c.size)) for c in plan.copies], title="files"
    )
    if output.format == "tsv":
        output.table(["what", "subject", "why"], [(n.kind, n.subject, n.text) for n in plan.notes])
    else:
        output.summary([(n.kind, _sentence(n)) for n in plan.notes], title="notes")


def report_result(output: Output, plan: Plan, result: Result, command: str) -> None:
    """The result on stdout, the notes on stderr."""
    for entry in plan.notes:
        _say(entry)
    if result.overflow:
        warn(f"{result.overflow} finite values became infinite in the cast")
    done = {
        "seconds": round(result.seconds, 3),
        "overflow": result.overflow,
        "verified_bytes": result.verified,
        "resumed_bytes": result.resumed,
    }
    output.document(command, {**_document(plan, result.path), **done})
    speed = f"{result.nbytes / result.seconds / 1e9:.2f} GB/s" if result.seconds > 0 else None
    verified = None if result.verified is None else f"{result.verified} bytes read back and equal"
    resumed = Bytes(result.resumed) if result.resumed else None
    output.summary(
        [*_pairs(plan, result.path), ("already written", resumed), ("time", f"{result.seconds:.2f} s, {speed}"), ("verified", verified)]
    )


def peak_memory(plan: Plan, threads: int) -> int:
    """Bytes of memory the run is expected to need at most: interpreter, buffers, plan."""
    pieces = len(plan.moves) + sum(1 + len(e.moves) for e in plan.encodings)
    return 48 * 2**20 + threads * (2 * plan.buffer + (64 * 2**20 if plan.encodings else 0)) + 1024 * pieces


def _pairs(plan: Plan, target: str) -> list[tuple[str, Any]]:
    source, made = plan.source, plan.target
    iteration = f"{source['iteration']} ({source['chosen']})" if source.get("iteration") else None
    details = ", ".join(f"{k} {v}" for k, v in made.items() if k not in ("format", "family", "notes"))
    return [
        ("source", source.get("path")),
        ("source format", source.get("format")),
        ("iteration", iteration),
        ("family", made.get("family")),
        ("target", target),
        ("target format", f"{made.get('format')}{f' ({details})' if details else ''}"),
        ("tensors", plan.tensors),
        ("size", Bytes(plan.nbytes)),
        ("files", len(plan.targets) + len(plan.copies)),
    ]


def _document(plan: Plan, target: str) -> dict[str, Any]:
    return {
        "source": plan.source,
        "target": {**plan.target, "path": target},
        "tensors": plan.tensors,
        "bytes": plan.nbytes,
        "tensor_bytes": plan.moved_bytes,
        "files": [{"path": t.path, "bytes": t.size} for t in plan.targets]
        + [{"path": c.target, "bytes": c.size, "copied_from": c.source} for c in plan.copies],
        "notes": [{"kind": n.kind, "subject": n.subject, "text": n.text} for n in plan.notes],
    }


def _say(entry: Note) -> None:
    text = _sentence(entry)
    warn(text) if entry.kind == "warning" else note(f"{entry.kind}: {text}")


def _sentence(entry: Note) -> str:
    return f"{entry.text}: {_short(entry.subject)}" if entry.subject else entry.text


def _short(subject: str) -> str:
    names = subject.split(", ")
    return subject if len(names) <= SHOWN else f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"
