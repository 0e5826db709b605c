"""What is said when a path or an iteration cannot be found: the facts, the nearest names, one next step."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from .detect import RANK_FOLDER
from .errors import CkptError, nearest
from .iterations import Found, listing, newest_complete, shorten
from .tracker import RELEASE, TRACKER_NAME, list_folder


def parent_of(path: str) -> str:
    """The folder around `path`, as the person would write it."""
    stripped = path.rstrip("/") or path
    if os.path.basename(stripped) in ("", ".", ".."):
        stripped = os.path.abspath(stripped)
    return os.path.dirname(stripped) or "."


def no_such_iteration(root: str, label: str, found: Sequence[Found], *, tracked: bool) -> CkptError:
    name = RELEASE if label == RELEASE else f"iter_{int(label):07d}"
    what = f"{TRACKER_NAME} names {label}, and {name} is not there" if tracked else f"iteration {label} is not in this folder"
    best = newest_complete(found)
    hint = f"`--iteration {best.label}` reads the newest complete one" if best else None
    return CkptError("E101", what, where=root, expected=name, found=listing(found) or "no iteration folder", hint=hint)


def no_tracker(root: str, found: Sequence[Found]) -> CkptError:
    best = newest_complete(found)
    return CkptError(
        "E104",
        f"there is no {TRACKER_NAME}, so nothing says which iteration is the latest",
        where=root,
        expected=TRACKER_NAME,
        found=listing(found) or "no iteration folder",
        hint=f"choose with `--iteration {best.label if best else 'N'}`",
    )


def no_such_path(given: str) -> CkptError:
    stripped = given.rstrip("/") or given
    if os.path.islink(stripped):
        return CkptError("E105", "this link leads nowhere", where=given, found=f"a link to {os.readlink(stripped)}")
    missing, parent = stripped, os.path.dirname(stripped) or "."
    while not os.path.isdir(parent) and os.path.dirname(parent) != parent:
        missing, parent = parent, os.path.dirname(parent) or "."
    near = nearest(os.path.basename(missing), list_folder(parent)) if os.path.isdir(parent) else []
    hint = f"did you mean {' or '.join(os.path.join(parent, n) for n in near)}?" if near else None
    if hint is None and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", given):
        hint = f"to read a model of the Hugging Face Hub, download it first: `hf download {given} --local-dir DIR`"
    shown = None if missing == stripped else f"{parent} exists, {os.path.basename(missing)} in it does not"
    return CkptError("E105", "no such file or folder", where=given, found=shown, hint=hint)


def not_a_checkpoint(given: str, names: list[str]) -> CkptError:
    hint = None
    if RANK_FOLDER.match(os.path.basename(os.path.abspath(given))):
        hint = f"this is the share of one rank; point at {parent_of(given)}"
    elif "snapshots" in names and os.path.isdir(os.path.join(given, "snapshots")):
        inside = list_folder(os.path.join(given, "snapshots"))
        revision = inside[0] if len(inside) == 1 else "REVISION"
        hint = f"this is a cache folder of the Hub; point at {os.path.join(given, 'snapshots', revision)}"
    else:
        marks = (TRACKER_NAME, "config.json")
        below = [n for n in names[:200] if any(os.path.isfile(os.path.join(given, n, mark)) for mark in marks)]
        if below:
            hint = f"did you mean {' or '.join(os.path.join(given, n) for n in below[:3])}?"
    return CkptError(
        "E106",
        "nothing here is a checkpoint that ckpt knows",
        where=given,
        expected=f"{TRACKER_NAME}, an iteration folder, or safetensors with config.json",
        found=shorten(names) or "an empty folder",
        hint=hint,
    )
