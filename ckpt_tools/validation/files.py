"""Checks of folders and files: tracker, completeness, leftovers, placeholders, JSON, checksums of whole files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..detect import UNFINISHED, folder_state
from ..errors import CkptError
from ..formats.hf import is_safe_name, read_json
from ..formats.torch_dist import TorchDist
from ..iterations import find_all
from ..source_files import opened
from ..tracker import TRACKER_NAME, list_folder, read_tracker
from .finding import Problem
from .json_files import twice_in_json
from .subject import Subject

TEMPORARY = re.compile(r".*\.tmp$|^\..*\.ckpt-(partial|journal)$|.*\.incomplete$|.*\.part$")
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "adapter_config.json")
BLOCK = 2**20


def errors(*codes: str) -> Callable[[Subject], Iterator[Problem]]:
    """A check that tells the errors with one of these codes that were met while the checkpoint was opened piece by piece."""

    def check(subject: Subject) -> Iterator[Problem]:
        for error in subject.errors:
            if error.code in codes:
                problem = problem_of(error)
                yield problem if problem.where else replace(problem, where=subject.directory)

    check.codes = codes  # type: ignore[attr-defined]
    return check


def problem_of(error: CkptError) -> Problem:
    """An error as a problem; its place is taken apart into file and tensor."""
    where, _, tensor = (error.where or "").partition(": ")
    return Problem(error.what, where, tensor, error.expected or "", error.found or "")


def incomplete(subject: Subject) -> Iterator[Problem]:
    """The save of this iteration did not end."""
    place = subject.location
    if place is None or not os.path.isdir(place.directory) or place.format in ("hf", "peft"):
        return
    state = folder_state(place.directory, weights_beside=place.weights is not None)
    if state.missing:
        yield Problem("the save of this iteration did not end", place.directory, expected="a finished save", found=_missing(state.missing))


def _missing(names: tuple[str, ...]) -> str:
    return f"missing: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def unfinished_export(subject: Subject) -> Iterator[Problem]:
    """Shards that still have the names under which an exporter writes them."""
    for name in subject.shards:
        if UNFINISHED.search(name):
            yield Problem("a shard still has the name it had while it was written: the export did not end", subject.shards[name])


def no_tracker(subject: Subject) -> Iterator[Problem]:
    """A run folder that nothing in Megatron would load."""
    place = subject.location
    if place is None or place.root is None or os.path.abspath(place.root) != os.path.abspath(subject.given):
        return
    try:
        tracked = read_tracker(place.root)
    except CkptError:
        return
    if tracked is None and place.label is not None:
        text = f"there is no {TRACKER_NAME}: Megatron would start this run from random weights"
        yield Problem(text, place.root, found=f"iteration {place.label} was validated")


def not_used(subject: Subject) -> Iterator[Problem]:
    """Iterations newer than the tracker's, and broken ones beside it."""
    place = subject.location
    if place is None or place.root is None or str(subject.iteration) != "latest":
        return
    for found in find_all(place.root, keep_release=True):
        if found.label == place.label:
            continue
        newer = found.folder.number is not None and place.iteration is not None and found.folder.number > place.iteration
        if not found.complete:
            yield Problem(
                f"iteration {found.label} beside it is incomplete and not used", found.folder.path, found=_missing(found.state.missing)
            )
        elif newer:
            yield Problem(f"iteration {found.label} is newer than what the tracker names and is not used", found.folder.path)


def unusual_name(subject: Subject) -> Iterator[Problem]:
    """An iteration folder that Megatron does not find."""
    place = subject.location
    if place is None or place.iteration is None or place.root is None:
        return
    name = os.path.basename(os.path.abspath(place.directory))
    usual = f"iter_{place.iteration:07d}"
    if name.startswith("iter_") and name != usual:
        yield Problem("Megatron looks for this iteration under another name", place.directory, expected=usual, found=name)


def leftovers(subject: Subject) -> Iterator[Problem]:
    """Temporary files of a writer that was killed."""
    for folder in dict.fromkeys(f for f in (subject.directory, subject.root, subject.hf_directory) if f and os.path.isdir(f)):
        for name in list_folder(folder):
            if TEMPORARY.match(name):
                yield Problem("a temporary file was left behind by a writer that did not end", os.path.join(folder, name))


def dangling_links(subject: Subject) -> Iterator[Problem]:
    """Links that lead nowhere: caches that were cleaned, copies of links."""
    for folder in dict.fromkeys(f for f in (subject.directory, subject.hf_directory) if f and os.path.isdir(f)):
        for name in list_folder(folder):
            path = os.path.join(folder, name)
            if os.path.islink(path) and not os.path.exists(path):
                yield Problem("a link that leads nowhere", path, found=os.readlink(path))


def placeholders(subject: Subject) -> Iterator[Problem]:
    """git-lfs pointers and HTML pages, also in place of the small files beside weights."""
    yield from errors("E205")(subject)
    told = {e.where for e in subject.errors if e.code == "E205"}
    for path in _small_files(subject):
        if path in told:
            continue
        try:
            with opened(path) as file:
                head = file.read(128)
        except CkptError:
            continue
        if head.startswith(b"version https://git-lfs"):
            yield Problem("this is a git-lfs pointer, not the file itself", path)


def _small_files(subject: Subject) -> Iterator[str]:
    for folder in dict.fromkeys(f for f in (subject.directory, subject.hf_directory) if f and os.path.isdir(f)):
        for name in list_folder(folder):
            path = os.path.join(folder, name)
            if name.endswith((".json", ".txt", ".model", ".jinja", ".py", ".pt")) and os.path.isfile(path):
                yield path


def broken_json(subject: Subject) -> Iterator[Problem]:
    """JSON files that cannot be parsed."""
    yield from errors("E216")(subject)
    told = {e.where for e in subject.errors}
    for path in _small_files(subject):
        if os.path.basename(path) in JSON_FILES and path not in told:
            try:
                read_json(path)
            except CkptError as error:
                if error.code == "E216":
                    yield problem_of(error)


def doubled_keys(subject: Subject) -> Iterator[Problem]:
    """JSON objects that say a thing twice and differently: every reader takes another one."""
    for path in _small_files(subject):
        if path.endswith(".json") and os.path.getsize(path) < 64 * 2**20 and os.path.basename(path) != "tokenizer.json":
            for key in twice_in_json(path):
                yield Problem(f"the key {key!r} is there twice with different values", path)


def unlisted_files(subject: Subject) -> Iterator[Problem]:
    """Data files that no index names."""
    details = subject.state.details if subject.state is not None else None
    if isinstance(details, TorchDist):
        used = {os.path.basename(p) for p in details.files}
        for name in subject.names:
            if name.endswith(".distcp") and name not in used:
                yield Problem("a data file that .metadata does not name: of an earlier save, or .metadata is of another one",
                              os.path.join(subject.directory, name))  # fmt: skip
    if subject.index is not None:
        for name in subject.shards.keys() - set(subject.index.weight_map.values()):
            yield Problem("a safetensors file that the index does not name", subject.shards[name])


def integrity_names(subject: Subject) -> Iterator[Problem]:
    """integrity.json against the files that are there."""
    listed = _integrity(subject)
    for name in listed or ():
        if not is_safe_name(name):
            yield Problem("integrity.json names a path outside the folder", subject.directory, found=repr(name))
        elif name not in subject.names:
            yield Problem("integrity.json lists a file that is not there", os.path.join(subject.directory, name))


def integrity_sums(subject: Subject) -> Iterator[Problem]:
    """SHA-256 of every file that integrity.json lists (Megatron-LM --verify-integrity, 0.18 and later)."""
    for name, expected in (_integrity(subject) or {}).items():
        path = os.path.join(subject.directory, name)
        if not is_safe_name(name) or not os.path.isfile(path):
            continue
        digest = hashlib.sha256()
        with opened(path) as file:
            while piece := file.read(BLOCK):
                digest.update(piece)
        if digest.hexdigest() != expected:
            yield Problem("the file is not the one that was saved", path, expected=f"sha256 {expected}", found=digest.hexdigest())


def _integrity(subject: Subject) -> dict[str, str] | None:
    path = os.path.join(subject.directory, "integrity.json")
    if not os.path.isfile(path):
        return None
    try:
        value = read_json(path)
    except CkptError:
        return None
    listed = value.get("files")
    if value.get("algorithm") != "sha256" or not isinstance(listed, dict):
        return None
    return {str(k): str(v).lower() for k, v in listed.items()}


def unclaimed(subject: Subject) -> Iterator[Problem]:
    """Errors of opening that no other check tells: there must be no silence about a file that could not be read."""
    from .table import CLAIMED

    for error in subject.errors:
        if error.code not in CLAIMED:
            problem = problem_of(error)
            yield Problem(f"{error.what} ({error.code})", problem.where, problem.tensor, problem.expected, problem.found)
