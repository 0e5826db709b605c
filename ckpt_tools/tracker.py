"""The tracker file of a run folder, and the iteration folders that lie beside it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .errors import CkptError
from .formats.safetensors import refuse_placeholder
from .source_files import opened

TRACKER_NAME = "latest_checkpointed_iteration.txt"
NON_PERSISTENT = "non_persistent"
RELEASE = "release"
TRACKER_LIMIT = 4096  # bytes; a real tracker has at most 20
DIGITS_LIMIT = 18  # an iteration fits in int64
ITERATION_FOLDER = re.compile(r"iter_([0-9]{1,18})\Z")
VERL_FOLDER = re.compile(r"global_step_([0-9]{1,18})\Z")
CHECKPOINT_FOLDER = re.compile(r"checkpoint-([0-9]{1,18})\Z")


@dataclass(frozen=True, slots=True)
class IterationFolder:
    """One folder of one iteration: label ("5" or "release"), number (None for release), path as reached from what the person typed."""

    label: str
    number: int | None
    path: str


def list_folder(path: str) -> list[str]:
    """Names in a folder, sorted, so that no result depends on the order in which a file system lists them. CkptError E901."""
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise CkptError("E901", "cannot list the folder", where=path, found=error.strerror or str(error)) from None


def read_head(path: str, limit: int) -> bytes:
    """At most `limit` bytes from the start of a file. CkptError E901."""
    try:
        with opened(path) as file:
            return file.read(limit)
    except OSError as error:
        raise CkptError("E901", "cannot read the file", where=path, found=error.strerror or str(error)) from None


def parse_label(text: str) -> str | None:
    """ "20" for "20", " 020 " or "iter_0000020"; "release"; None for anything else. The number is ASCII digits only."""
    text = text.strip()
    if text == RELEASE:
        return RELEASE
    text = text.removeprefix("iter_")
    if text.isascii() and text.isdigit() and len(text.lstrip("0")) <= DIGITS_LIMIT:
        return str(int(text))
    return None


def read_tracker(root: str) -> str | None:
    """What the tracker of `root` names: "20", "release", or None when there is no tracker file.

    Blanks, CRLF and a UTF-8 BOM are tolerated (Megatron-LM strips the text, training/checkpointing.py read_metadata).
    Errors: E102 empty or neither a number nor "release", E205 git-lfs pointer or HTML page, E901 unreadable.
    """
    path = os.path.join(root, TRACKER_NAME)
    if not os.path.isfile(path):
        return None
    raw = read_head(path, TRACKER_LIMIT)
    refuse_placeholder(path, raw)
    text = raw.removeprefix(b"\xef\xbb\xbf").decode("ascii", "replace").strip()
    label = None if text.startswith("iter_") else parse_label(text)
    if label is None:
        raise CkptError(
            "E102",
            "the tracker file names no iteration",
            where=path,
            expected='a number or "release"',
            found="an empty file" if not raw else f"{raw[:40]!r}{f' and {len(raw) - 40} more bytes' if len(raw) > 40 else ''}",
            hint="choose one with `--iteration N`, or write the right number into the file",
        )
    return label


def iteration_folders(root: str) -> tuple[IterationFolder, ...]:
    """Every `iter_N`, `release` and verl `global_step_N` folder right inside `root`, sorted by number, release last.

    Dangling links are listed too: a tracker may name one. Two spellings of one number: the one Megatron looks for (7 digits) comes first.
    """
    found = []
    for name in list_folder(root):
        path = os.path.join(root, name)
        match = ITERATION_FOLDER.match(name) or VERL_FOLDER.match(name)
        if not match and name != RELEASE:
            continue
        if os.path.isdir(path) or (os.path.islink(path) and not os.path.exists(path)):
            found.append(IterationFolder(str(int(match[1])), int(match[1]), path) if match else IterationFolder(RELEASE, None, path))
    return tuple(sorted(found, key=_order))


def checkpoint_folders(root: str) -> tuple[IterationFolder, ...]:
    """`checkpoint-N` folders (ms-swift, transformers Trainer) right inside `root`, sorted by number. Each is a root of its own."""
    found = []
    for name in list_folder(root):
        match = CHECKPOINT_FOLDER.match(name)
        if match and os.path.isdir(os.path.join(root, name)):
            found.append(IterationFolder(str(int(match[1])), int(match[1]), os.path.join(root, name)))
    return tuple(sorted(found, key=_order))


def label_of_folder(path: str) -> str | None:
    """The iteration that a folder's own name states: "5" for iter_0000005, "release" for release, None for other names."""
    name = os.path.basename(os.path.abspath(path))
    match = ITERATION_FOLDER.match(name)
    if match:
        return str(int(match[1]))
    return RELEASE if name == RELEASE else None


def _order(folder: IterationFolder) -> tuple[bool, int, bool, str]:
    usual = f"iter_{folder.number or 0:07d}"
    name = os.path.basename(folder.path)
    return folder.number is None, folder.number or 0, name != usual, name
