"""Checks of Megatron's own files: pieces and records of torch_dist, rank files of the legacy format, checksums."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator
from itertools import pairwise
from math import prod

from ..checksums import crc_problems
from ..errors import CkptError
from ..formats.torch_dist import TorchDist
from .files import problem_of
from .finding import Problem
from .subject import Subject


def overlaps(subject: Subject) -> Iterator[Problem]:
    """Entries of a data file that share bytes: a damaged or edited .metadata."""
    details = _torch_dist(subject)
    if details is None:
        return
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in details.tensors.items():
        for chunk in tensor.chunks:
            if chunk.extent is not None:
                spans.setdefault(chunk.extent.path, []).append((chunk.extent.offset, chunk.extent.length, name))
    for stored in details.objects.values():
        spans.setdefault(stored.extent.path, []).append((stored.extent.offset, stored.extent.length, stored.fqn))
    for path, entries in spans.items():
        entries.sort()
        for (start, length, name), (begin, _, other) in pairwise(entries):
            if begin < start + length:
                yield Problem(f"shares bytes of the file with {other}", path, name, found=f"{start} to {start + length}, and from {begin}")


def object_grids(subject: Subject) -> Iterator[Problem]:
    """Objects that are stored once per rank and of which some ranks' are missing: megatron-core refuses such a grid."""
    details = _torch_dist(subject)
    if details is None:
        return
    grids: dict[str, dict[tuple[int, ...], set[tuple[int, ...]]]] = {}
    for stored in details.objects.values():
        if stored.grid:
            grids.setdefault(stored.key, {}).setdefault(stored.grid, set()).add(stored.index)
    for key, found in grids.items():
        if len(found) > 1:
            yield Problem("the ranks do not agree how many there are", details.directory, key, found=", ".join(map(str, found)))
            continue
        for grid, indexes in found.items():
            there = sum(1 for i in indexes if len(i) == len(grid) and all(0 <= a < n for a, n in zip(i, grid, strict=True)))
            if there != prod(grid) or len(indexes) != there:
                text = "objects of some ranks are missing"
                yield Problem(text, details.directory, key, expected=f"{prod(grid)}", found=f"{there}")


def common_state(subject: Subject) -> Iterator[Problem]:
    """A torch_dist iteration without the state that Megatron loads first."""
    details = _torch_dist(subject)
    if details is not None and details.backend and details.common is None:
        yield Problem("there is no common state (common.pt, or common_state in the data files)", details.directory)


def replicas(subject: Subject) -> Iterator[Problem]:
    """Copies of one tensor on several ranks that are not equal."""
    from ..replicas import check_replicas

    legacy = subject.legacy
    if legacy is None:
        return
    try:
        check_replicas(legacy, threads=subject.threads)
    except CkptError as error:
        if error.code != "E225":
            raise
        yield problem_of(error)


def equal_ranks(subject: Subject) -> Iterator[Problem]:
    """Rank files that are the same bytes: one was copied over another, and a rank's shards are lost."""
    if subject.legacy is None:
        return
    by_size: dict[int, list[str]] = {}
    for path in subject.legacy.files:
        by_size.setdefault(os.path.getsize(path), []).append(path)
    for paths in by_size.values():
        for number, path in enumerate(paths):
            for other in paths[:number]:
                if filecmp.cmp(path, other, shallow=False):
                    yield Problem("the files of two ranks are the same bytes: one was copied over the other", path, found=other)


def checksums(subject: Subject) -> Iterator[Problem]:
    """CRC-32 of every record of torch.save files, which torch stores and does not look at."""
    if subject.state is None:
        return
    for error in crc_problems(subject.state):
        yield problem_of(error)


def no_checksums(subject: Subject) -> Iterator[Problem]:
    """safetensors files: nothing tells a flipped bit."""
    place = subject.hf_directory
    if place is not None and subject.headers and not os.path.exists(os.path.join(os.path.dirname(place), "SHA256SUMS")):
        yield Problem("safetensors files hold no checksums: a flipped bit in them cannot be found; keep sha256 sums beside them", place)


def folder_iteration(subject: Subject) -> Iterator[Problem]:
    """The iteration that the folder's name states against the one inside."""
    place, inside = subject.location, subject.common.get("iteration")
    if place is not None and place.iteration is not None and type(inside) is int and inside != place.iteration:
        text = "the folder and the state in it are of different iterations"
        yield Problem(text, place.directory, expected=str(place.iteration), found=str(inside))


def _torch_dist(subject: Subject) -> TorchDist | None:
    details = subject.state.details if subject.state is not None else None
    return details if isinstance(details, TorchDist) else None
