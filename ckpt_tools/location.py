"""Which folder a path means, which iteration is read, what lies beside it: told by names and the tracker, never by sizes or dates."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .detect import folder_state, is_hf, is_peft, producer, refuse_placeholders, safetensors_files, unfinished_weights, weights_folder
from .errors import CkptError
from .formats.safetensors import refuse_placeholder
from .iterations import Found, find_all, listing, look, look_verl, newest_complete, number_of, shorten, verl_step
from .refusals import no_such_iteration, no_such_path, no_tracker, not_a_checkpoint, parent_of
from .tracker import (
    NON_PERSISTENT,
    RELEASE,
    TRACKER_NAME,
    IterationFolder,
    checkpoint_folders,
    label_of_folder,
    list_folder,
    parse_label,
    read_head,
    read_tracker,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One iteration that exists: label ("5" or "release"), folder, format (None when not recognised), what an interrupted save lacks."""

    label: str
    path: str
    format: str | None
    complete: bool
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Location:
    """What a path given by a person stands for.

    given       the path as typed.
    root        folder that holds the tracker and the iteration folders; None for an HF folder, a single file, a folder on its own.
    directory   the folder (or single file) to open.
    format      hf, torch_dist, torch, torch_dcp (may be fsdp_dtensor: the folder does not say), zarr, state (common.pt alone), peft.
    iteration   its number; None for a release and for HF folders that state none.
    label       "5" or "release"; None like iteration.
    chosen      one sentence saying how the iteration was chosen.
    candidates  every iteration found, by number, release last.
    weights     folder with the safetensors weights that belong to the iteration (split checkpoint, or weights stored twice); else None.
    producer    megatron-lm, ms-swift, megatron-bridge, verl, slime: whose layout it is as far as files tell; else None.
    warnings    sentences worth showing.
    """

    given: str
    root: str | None
    directory: str
    format: str
    iteration: int | None
    label: str | None
    chosen: str
    candidates: tuple[Candidate, ...]
    weights: str | None
    producer: str | None
    warnings: tuple[str, ...]


def _candidate(found: Found) -> Candidate:
    return Candidate(found.label, found.path, found.state.format, found.complete, found.state.missing)


def locate(path: str, iteration: str | int = "latest", *, need_complete: bool = True, allow_untracked: bool = False) -> Location:
    """Find the one checkpoint that `path` and `iteration` mean.

    path             run folder, one iteration folder, HF or PEFT folder, one .safetensors or .pt file, ms-swift checkpoint-N, verl folders.
    iteration        "latest" (what the tracker says; in Megatron's order a non_persistent one at least as new wins), a number, "release".
    need_complete    refuse an iteration whose save was interrupted (E103); False returns it with a warning.
    allow_untracked  without a tracker use the newest complete iteration and say so (for looking, not for converting).

    Errors: E101 no such iteration, E102 bad tracker text, E103 incomplete, E104 no tracker, E105 no such path, E106 not a checkpoint,
    E107 not an iteration, E108 unknown backend, E205 placeholder files, E901 unreadable.
    """
    given = os.fspath(path)
    wanted = _wanted(iteration)
    if not os.path.exists(given):
        raise no_such_path(given)
    if os.path.isfile(given):
        if os.path.basename(given) == TRACKER_NAME:
            folder = os.path.dirname(given) or "."
            return replace(locate(folder, iteration, need_complete=need_complete, allow_untracked=allow_untracked), given=given)
        return _single_file(given, wanted)
    names = list_folder(given)
    tracked = os.path.isfile(os.path.join(given, TRACKER_NAME))
    found = find_all(given, keep_release=tracked)
    if tracked or found:
        return _in_root(given, wanted, found, names, need_complete, allow_untracked)
    direct = _direct(given)
    if direct is not None:
        return _checked(direct, wanted, need_complete)
    runs = checkpoint_folders(given)
    if runs and (not safetensors_files(names) or wanted in {r.label for r in runs}):
        return _in_run(given, wanted, runs, need_complete, allow_untracked)
    return _model_folder(given, wanted, names, runs, need_complete)


def _wanted(iteration: str | int) -> str | None:
    """The label asked for; None for latest. CkptError E107."""
    text = str(iteration).strip()
    if text == "latest":
        return None
    label = parse_label(text)
    if label is None:
        raise CkptError("E107", "this is not an iteration", found=repr(text[:80]), expected='"latest", "release" or a number')
    return label


# ---- a root: tracker and iteration folders ------------------------------------------------------------------------------------------


def _in_root(given: str, wanted: str | None, found: list[Found], names: list[str], need_complete: bool, allow_untracked: bool) -> Location:
    warnings: list[str] = []
    candidates = tuple(_candidate(f) for f in found)
    label, chosen, temporary = _choose(given, wanted, found, warnings)
    if label is None and not (allow_untracked and found):
        if safetensors_files(names):
            said = f"no {TRACKER_NAME} names {listing(found)}: only the safetensors weights are used; --iteration reads the rest too"
            return replace(_model_folder(given, None, names, (), need_complete), candidates=candidates, warnings=(said,))
        raise no_tracker(given, found)
    if label is None:
        newest = newest_complete(found) or found[-1]
        label = newest.label
        chosen = f"there is no {TRACKER_NAME}; {label} is the newest complete iteration of {len(found)}"
        if not newest.complete:
            chosen = f"there is no {TRACKER_NAME} and no complete iteration; {label} is the newest of {len(found)}"
        warnings.append(f"no {TRACKER_NAME}: Megatron would start this run from random weights")
    matches = [f for f in found if f.label == label]
    second = os.path.join(given, NON_PERSISTENT)
    matches.sort(key=lambda f: (os.path.dirname(f.folder.path) == second) != temporary)
    if not matches:
        if not found and safetensors_files(names) and wanted is None:
            # ms-swift's checkpoint-N-merged: tracker and HF weights, iter_N only if there was a common.pt to keep.
            said = f"{TRACKER_NAME} names {label}, and there is no iteration folder: only the safetensors weights are here"
            place = _model_folder(given, None, names, (), need_complete)
            return replace(place, iteration=number_of(label), label=label, chosen=chosen, producer=producer(given, given), warnings=(said,))
        raise no_such_iteration(given, label, found, tracked=wanted is None)
    pick = matches[0]
    if len(matches) > 1:
        warnings.append(f"{label} is there {len(matches)} times; {pick.path} is used, not {', '.join(m.path for m in matches[1:])}")
    if wanted is None and pick.folder.number is not None:
        newer = [f for f in found if f.folder.number is not None and f.folder.number > pick.folder.number]
        if newer:
            warnings.append(f"{listing(newer)} is newer than what the tracker names and is not used")
    name, usual = os.path.basename(pick.folder.path), f"iter_{pick.folder.number or 0:07d}"
    if name.startswith("iter_") and name != usual:
        warnings.append(f"Megatron itself looks for {usual}, not {name}")
    place = _location(given, os.path.dirname(pick.folder.path) if temporary else given, pick, chosen, candidates, warnings)
    return _complete(place, pick, found, need_complete)


def _choose(root: str, wanted: str | None, found: Sequence[Found], warnings: list[str]) -> tuple[str | None, str, bool]:
    """(label or None without a tracker, the sentence, whether it is the non_persistent one)."""
    second = os.path.join(root, NON_PERSISTENT)
    if wanted is not None:
        try:
            tracked = read_tracker(root)
        except CkptError as error:
            tracked = None
            warnings.append(f"{TRACKER_NAME}: {error.what} ({error.found or 'placeholder'})")
        places = {os.path.dirname(f.folder.path) for f in found if f.label == wanted}
        beside = f"the tracker names {tracked}" if tracked else "no tracker says otherwise"
        return wanted, f"iteration {wanted} was asked for ({beside})", places == {second}
    tracked = read_tracker(root)
    temporary = read_tracker(second) if os.path.isdir(second) else None
    if temporary is None:
        return tracked, f"{TRACKER_NAME} names {tracked}", False
    # Megatron-LM training/checkpointing.py _load_base_checkpoint: a non-persistent checkpoint wins when its number is at least as large
    # (a release counts as 0); that it cannot be a release itself is an error there.
    if temporary == RELEASE:
        raise CkptError(
            "E102", "a non-persistent checkpoint cannot be a release", where=os.path.join(second, TRACKER_NAME), found=repr(temporary)
        )
    if int(temporary) >= (number_of(tracked) or 0 if tracked else -1):
        against = f"at least as new as {tracked}" if tracked else f"and there is no {TRACKER_NAME} beside it"
        return temporary, f"{NON_PERSISTENT}/{TRACKER_NAME} names {temporary}, {against}", True
    return tracked, f"{TRACKER_NAME} names {tracked}; the {NON_PERSISTENT} one, {temporary}, is older", False


# ---- one iteration folder, given by itself ------------------------------------------------------------------------------------------


def _direct(given: str) -> Location | None:
    """The location of a folder that is one iteration itself; None when it is not."""
    verl = verl_step(given)
    if verl is not None:
        step, start = verl
        found = look_verl(step, start)
        return _given_iteration(given, os.path.dirname(step.path), found) if found.path != start or found.state.format else None
    path, label = given, label_of_folder(given)
    if label is None and os.path.islink(given.rstrip("/")):
        path = os.path.realpath(given)
        label = label_of_folder(path)
    if label is None:
        found = look(IterationFolder("", None, given), None)
        # Weights of an unnamed folder are not looked for outside it: what lies beside it may be anything.
        if found.state.format in (None, "hf"):
            return None
        return _location(given, None, found, "the folder itself was given; its name states no iteration", (), [])
    root = parent_of(path)
    found = look(IterationFolder(label, number_of(label), path), weights_folder(root))
    if found.state.format in (None, "hf") and (label == RELEASE or found.state.format == "hf"):
        return None
    return _given_iteration(given, root, found)


def _given_iteration(given: str, root: str, found: Found) -> Location:
    warnings: list[str] = []
    try:
        tracked = read_tracker(root)
    except CkptError as error:
        tracked = None
        warnings.append(f"{TRACKER_NAME} beside this folder: {error.what} ({error.found or 'placeholder'})")
    if tracked is not None and tracked != found.label:
        warnings.append(f"{TRACKER_NAME} beside this folder names {tracked}, not {found.label}")
    candidates = tuple(_candidate(f) for f in find_all(root, keep_release=True))
    return _location(given, root, found, f"the folder of iteration {found.label} itself was given", candidates, warnings)


def _checked(place: Location, wanted: str | None, need_complete: bool) -> Location:
    if wanted is not None and wanted != place.label:
        raise CkptError(
            "E101",
            f"iteration {wanted} was asked for, and the folder given is another one",
            where=place.given,
            expected=wanted,
            found=place.label or "a folder whose name states no iteration",
            hint="leave out --iteration, or point at the run folder" + (f" {place.root}" if place.root else ""),
        )
    # Looked at again rather than passed along: the state of one folder is a handful of names.
    state = folder_state(place.directory, weights_beside=place.weights is not None)
    found = Found(IterationFolder(place.label or "", place.iteration, place.directory), place.directory, state, place.weights)
    return _complete(place, found, [], need_complete)


# ---- run folders of checkpoint-N, model folders, single files -----------------------------------------------------------------------


def _in_run(given: str, wanted: str | None, runs: Sequence[IterationFolder], need_complete: bool, allow_untracked: bool) -> Location:
    """A run folder whose checkpoint-N folders are roots of their own (ms-swift) or HF folders (transformers Trainer)."""
    candidates = []
    for run in runs:
        try:
            inner = locate(run.path)
            candidates.append(Candidate(run.label, run.path, inner.format, True, ()))
        except CkptError as error:
            candidates.append(Candidate(run.label, run.path, None, False, (error.what,)))
    label, chosen = wanted, f"iteration {wanted} was asked for"
    complete = [c.label for c in candidates if c.complete]
    exist = shorten([c.label if c.complete else f"{c.label} (incomplete)" for c in candidates])
    if label is None:
        if not allow_untracked:
            raise CkptError(
                "E104",
                f"a run folder with {len(runs)} checkpoint-N folders and no {TRACKER_NAME} to choose one",
                where=given,
                found=exist,
                hint=f"add `--iteration {(complete or [runs[-1].label])[-1]}`, or point at one of the folders",
            )
        label = (complete or [runs[-1].label])[-1]
        chosen = f"there is no {TRACKER_NAME}; checkpoint-{label} is the newest complete one of {len(runs)}"
    run_path = next((r.path for r in runs if r.label == label), None)
    if run_path is None:
        raise CkptError("E101", f"checkpoint-{label} is not in this run folder", where=given, expected=label, found=exist)
    place = locate(run_path, need_complete=need_complete, allow_untracked=allow_untracked)
    number = number_of(label) if place.label is None else place.iteration
    return replace(place, given=given, iteration=number, label=place.label or label, chosen=chosen, candidates=tuple(candidates))


def _model_folder(given: str, wanted: str | None, names: list[str], runs: Sequence[IterationFolder], need_complete: bool) -> Location:
    """An HF or PEFT folder. CkptError E106 when it is neither."""
    if not is_hf(names) and not is_peft(names):
        raise not_a_checkpoint(given, names)
    if wanted is not None:
        raise CkptError(
            "E101",
            f"iteration {wanted} was asked for, and this folder holds no iterations",
            where=given,
            expected=wanted,
            found="an HF folder without iteration folders",
            hint="leave out --iteration",
        )
    unfinished = unfinished_weights(names)
    warnings = []
    if unfinished:
        if need_complete:
            raise CkptError(
                "E103", "the export into this folder did not end", where=given, found=shorten(list(unfinished)), hint="export it again"
            )
        warnings.append(f"unfinished export: {shorten(list(unfinished))}")
    if runs:
        warnings.append(f"the folder itself is read; it also has checkpoint-{shorten([r.label for r in runs])}")
    kind = "peft" if is_peft(names) else "hf"
    said = "a PEFT adapter folder, which has no iterations" if kind == "peft" else "an HF folder, which has no iterations"
    return Location(given, None, given, kind, None, None, said, (), None, None, tuple(warnings))


def _single_file(given: str, wanted: str | None) -> Location:
    name = os.path.basename(given)
    folder = os.path.dirname(given) or "."
    if not name.endswith((".safetensors", ".pt")):
        part = name in (".metadata", "metadata.json", "config.json", "adapter_config.json") or name.endswith((".distcp", ".index.json"))
        hint = f"point at the folder: {folder}" if part else "a single file must be .safetensors or .pt"
        raise CkptError("E106", "this file is no checkpoint by itself", where=given, hint=hint)
    if wanted is not None:
        raise CkptError("E101", f"iteration {wanted} was asked for, and a single file was given", where=given, hint="leave out --iteration")
    refuse_placeholder(given, read_head(given, 128))
    kind = "state" if name == "common.pt" else "torch"
    if name.endswith(".safetensors"):
        kind = "peft" if name.startswith("adapter_model") else "hf"
    return Location(given, None, given, kind, None, None, "a single file was given", (), None, None, ())


# ---- shared by the above ------------------------------------------------------------------------------------------------------------


def _location(given: str, root: str | None, found: Found, chosen: str, candidates: tuple[Candidate, ...], warnings: list[str]) -> Location:
    all_warnings = [*warnings, *found.state.remarks]
    if root and is_peft(list_folder(root)):
        all_warnings.append(f"a PEFT adapter lies in {root} beside the iteration folder")
    label = found.label or None
    number, written_by = found.folder.number, producer(root, found.path)
    # A format that is None never leaves this module: _complete refuses it.
    return Location(
        given, root, found.path, found.state.format or "", number, label, chosen, candidates, found.weights, written_by, tuple(all_warnings)
    )


def _complete(place: Location, pick: Found, found: Sequence[Found], need_complete: bool) -> Location:
    """The place itself, or CkptError E103/E108/E205 when what it names cannot be read; with need_complete False a warning instead."""
    if os.path.isdir(pick.path):
        refuse_placeholders(pick.path)
    if pick.complete:
        return place
    what = f"{os.path.basename(os.path.abspath(pick.folder.path))} is incomplete: {shorten(list(pick.state.missing))} missing"
    if pick.state.format is not None and not need_complete:
        return replace(place, warnings=(*place.warnings, what))
    if pick.state.remarks and not pick.state.missing:
        raise CkptError("E108", "a distributed checkpoint of an unknown kind", where=pick.path, found="; ".join(pick.state.remarks))
    better = newest_complete(found) if found else None
    if better is not None and better.label == pick.label:
        better = None
    where = pick.path
    hint = "no complete iteration lies beside it" if place.candidates else "the save was interrupted; use another checkpoint"
    if better is None and place.candidates:
        whole = [c.label for c in place.candidates if c.complete and c.label != pick.label]
        hint = f"the newest complete one is {whole[-1]}: point at it or at the run folder" if whole else hint
    if better is not None:
        hint = f"the newest complete iteration is {better.label}: add `--iteration {better.label}` to use it"
    if pick.state.format == "state":
        hint = f"common.pt alone needs safetensors weights beside it; none in {place.root or pick.path}. {hint}"
    raise CkptError(
        "E103",
        what,
        where=where,
        expected="a finished save",
        found=shorten(list_folder(where)) if os.path.isdir(where) else None,
        hint=hint,
    )
