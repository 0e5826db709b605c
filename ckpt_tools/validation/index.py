"""Checks of safetensors folders: the index against the headers, both ways."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import nearest
from ..formats.hf import is_safe_name
from .finding import Problem
from .subject import Subject


def unsafe_paths(subject: Subject) -> Iterator[Problem]:
    """File names in an index that lead out of the folder."""
    from .files import errors

    if subject.index is not None:
        for name in dict.fromkeys(subject.index.weight_map.values()):
            if not is_safe_name(name):
                tensor = next(n for n, f in subject.index.weight_map.items() if f == name)
                yield Problem("the index sends a tensor to a path outside the folder", subject.index.path, tensor, found=repr(name))
    told = subject.index is not None
    yield from (p for p in errors("E214")(subject) if not (told and p.where == subject.index.path))  # type: ignore[union-attr]


def missing_shards(subject: Subject) -> Iterator[Problem]:
    """Files that the index names and that are not there."""
    if subject.index is None:
        return
    for name in dict.fromkeys(subject.index.weight_map.values()):
        if is_safe_name(name) and name not in subject.shards:
            lost = [n for n, f in subject.index.weight_map.items() if f == name]
            near = nearest(name, subject.shards, 1)
            found = f"{len(lost)} tensors would be missing" + (f"; there is a {near[0]}, which is not the same name" if near else "")
            yield Problem(f"the index names {name}, which is not in the folder", subject.index.path, lost[0], found=found)


def ghosts(subject: Subject) -> Iterator[Problem]:
    """Tensors that the index lists and no file holds."""
    holders = _holders(subject, stray=True)
    for name, file in _listed(subject):
        if name not in holders and file in subject.headers:
            yield Problem("the index lists a tensor that is in no file", _index_path(subject), name, expected=f"in {file}", found="nowhere")


def misdirected(subject: Subject) -> Iterator[Problem]:
    """Tensors that are in another file than the index says."""
    holders = _holders(subject, stray=True)
    for name, file in _listed(subject):
        if file in subject.headers and name in holders and file not in holders[name]:
            yield Problem(
                "the index sends a tensor to the wrong file",
                _index_path(subject),
                name,
                expected=f"in {', '.join(holders[name])}",
                found=file,
            )


def unlisted(subject: Subject) -> Iterator[Problem]:
    """Tensors that a file holds and the index does not list."""
    if subject.index is None:
        return
    for name, files in _holders(subject).items():
        if name not in subject.index.weight_map:
            yield Problem("a file holds a tensor that the index does not list", subject.index.path, name, found=f"in {files[0]}")


def twins(subject: Subject) -> Iterator[Problem]:
    """Tensors that are in two files."""
    from ..diff.reading import same_bits

    for name, files in _holders(subject).items():
        if len(files) < 2:
            continue
        first, second = (subject.headers[f].tensors[name] for f in files[:2])
        equal = same_bits(first, second)
        used = (subject.index.weight_map.get(name) if subject.index is not None else None) or "nothing says which counts"
        yield Problem(
            f"a tensor is in two files, and the two are {'equal' if equal else 'not equal'}",
            subject.shards[files[0]],
            name,
            found=f"in {', '.join(files)}; the index says {used}" if subject.index is not None else f"in {', '.join(files)}; {used}",
            severity="warning" if equal or subject.index is not None else "error",
        )


def total_size(subject: Subject) -> Iterator[Problem]:
    """metadata.total_size of the index: bytes of all tensors, headers not counted."""
    if subject.index is None or any(f not in subject.headers for f in subject.index.weight_map.values()):
        return
    computed = sum(subject.headers[f].tensors[n].nbytes for n, f in subject.index.weight_map.items() if n in subject.headers[f].tensors)
    table = subject.index.value.get("metadata")
    stored = table.get("total_size") if isinstance(table, dict) else None
    if stored != computed:
        yield Problem(
            "total_size of the index is not the size of the tensors", subject.index.path, expected=str(computed), found=repr(stored)
        )


def no_index(subject: Subject) -> Iterator[Problem]:
    """Several files and nothing that says which tensor is where: transformers does not load it."""
    place = subject.hf_directory
    if place is None or subject.index is not None or len(subject.shards) < 2:
        return
    if any(e.where and e.where.endswith(".index.json") for e in subject.errors):
        return
    yield Problem(
        "several safetensors files and no index", place, expected="model.safetensors.index.json", found=f"{len(subject.shards)} files"
    )


def no_format(subject: Subject) -> Iterator[Problem]:
    """Files without __metadata__ {"format": "pt"}, which transformers before 5 refuses."""
    for name, header in subject.headers.items():
        if (header.metadata or {}).get("format") is None:
            yield Problem('no "format" in __metadata__: transformers before 5 refuses the file', subject.shards[name])


def _listed(subject: Subject) -> list[tuple[str, str]]:
    return list(subject.index.weight_map.items()) if subject.index is not None else []


def _index_path(subject: Subject) -> str:
    return subject.index.path if subject.index is not None else ""


def _holders(subject: Subject, *, stray: bool = False) -> dict[str, list[str]]:
    """Tensor -> files that hold it; files that the index does not name only with `stray` (another check tells of them)."""
    found: dict[str, list[str]] = {}
    named = None if subject.index is None or stray else set(subject.index.weight_map.values())
    for file, header in sorted(subject.headers.items()):
        if named is None or file in named:
            for name in header.tensors:
                found.setdefault(name, []).append(file)
    return found
