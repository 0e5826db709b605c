"""What is safe to mend: an index that can be made anew from the files, its total_size, a tracker. Weights are never touched.

mends, refused = plan_mends(subject, report)
apply_mends(mends)
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass

from ..errors import CkptError
from ..formats.hf import INDEX_NAME
from ..iterations import find_all, newest_complete
from ..tracker import TRACKER_NAME
from .run import Report
from .subject import Subject

INDEX_CODES = frozenset({"V203", "V204", "V205", "V209", "V210"})
TRACKER_CODES = frozenset({"V101", "V102", "V104"})
SHARD_CODES = frozenset({"V106", "V201", "V202", "V206", "V207", "V208", "V115"})  # an index of such files would hide what is wrong


@dataclass(frozen=True, slots=True)
class Mend:
    """One file to be written: path, why, what it says now and will say, its new content."""

    path: str
    codes: tuple[str, ...]
    before: str
    after: str
    content: bytes


def plan_mends(subject: Subject, report: Report) -> tuple[list[Mend], list[str]]:
    """(files to write, sentences about what will not be mended and why). Nothing is written."""
    found = {f.code for f in report.findings}
    mends: list[Mend] = []
    refused: list[str] = []
    if found & INDEX_CODES:
        reason = _why_no_index(subject, found)
        if reason:
            refused.append(f"the index is not made anew: {reason}")
        else:
            mends.append(_index(subject, tuple(sorted(found & INDEX_CODES))))
    if found & TRACKER_CODES:
        mend = _tracker(subject, tuple(sorted(found & TRACKER_CODES)))
        if mend is None:
            refused.append("the tracker is not written: there is no complete iteration that it could name")
        else:
            mends.append(mend)
    return mends, refused


def apply_mends(mends: list[Mend]) -> None:
    """Write the files, each whole or not at all. CkptError E581 when one cannot be written."""
    for mend in mends:
        folder = os.path.dirname(mend.path) or "."
        temporary = None
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=".ckpt-", suffix=".tmp", dir=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(mend.content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, os.stat(mend.path).st_mode & 0o777 if os.path.exists(mend.path) else 0o644)
            os.replace(temporary, mend.path)
            temporary = None
        except OSError as error:
            raise CkptError("E581", "the file could not be mended", where=mend.path, found=error.strerror or str(error)) from None
        finally:
            if temporary is not None:
                os.unlink(temporary)


def _why_no_index(subject: Subject, found: set[str]) -> str:
    """Why an index made from the files could hide a fault; "" when it cannot."""
    wrong = sorted(found & SHARD_CODES)
    if wrong:
        return f"files are missing, broken or contradict each other ({', '.join(wrong)})"
    model = next((m for m in subject.models if m.side == "hf"), None)
    if "V203" in found and (model is None or model.unknown or model.missing):
        return "it lists tensors that are in no file, and without them the model is not known to be complete"
    return ""


def _index(subject: Subject, codes: tuple[str, ...]) -> Mend:
    place = subject.hf_directory or ""
    listed = subject.index.weight_map if subject.index is not None else {}
    files = set(listed.values()) if listed else set(subject.headers)
    for name in listed:
        files |= {
            f
            for f, h in subject.headers.items()
            if name in h.tensors and listed[name] != f and name not in subject.headers[listed[name]].tensors
        }
    weight_map = {n: f for f in sorted(files) for n in subject.headers[f].tensors}
    tensors = [subject.headers[f].tensors[n] for n, f in weight_map.items()]
    metadata = dict(subject.index.value.get("metadata") or {}) if subject.index is not None else {}
    before = f"{len(listed)} tensors, total_size {metadata.get('total_size')}" if subject.index is not None else "no index"
    metadata["total_size"] = sum(t.nbytes for t in tensors)
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(t.numel for t in tensors)
    content = (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()
    path = subject.index.path if subject.index is not None else os.path.join(place, INDEX_NAME)
    return Mend(path, codes, before, f"{len(weight_map)} tensors in {len(files)} files, total_size {metadata['total_size']}", content)


def _tracker(subject: Subject, codes: tuple[str, ...]) -> Mend | None:
    root = subject.root
    if root is None:
        return None
    own = [
        f
        for f in find_all(root, keep_release=True)
        if os.path.dirname(f.folder.path) == root.rstrip("/") or os.path.dirname(f.folder.path) == root
    ]
    newest = newest_complete(own)
    if newest is None:
        return None
    path = os.path.join(root, TRACKER_NAME)
    before = "no file"
    if os.path.isfile(path):
        with open(path, "rb") as file:
            before = repr(file.read(40))
    return Mend(path, codes, before, repr(newest.label.encode()), newest.label.encode())
