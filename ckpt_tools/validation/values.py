"""Checks that read tensors: numbers that no training leaves behind, copies that differ, masters that tell another story."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..diff.reading import bits, boxes, first_difference, same_bits, samples_agree, width
from ..lazy import read_box
from ..model_names import EMBEDDING, HEAD
from ..optimizer.state import MASTER
from ..optimizer.values import compare_masters
from ..tensors import TensorMetadata
from .finding import Problem
from .model import Model
from .subject import Subject

if TYPE_CHECKING:
    from ..statistics import Statistics

SOME = 20
PARTS = (2, 4, 8, 16)  # ranks whose shard may never have been written
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)|(?<=\.linear_fc[12]\.weight)\d+$")


def _weights(subject: Subject) -> Iterator[tuple[Model, str, TensorMetadata, Statistics]]:
    for model in subject.models:
        for name, figures in subject.statistics(model).items():
            yield model, name, model.tensors[name], figures


def nans(subject: Subject) -> Iterator[Problem]:
    """NaN in weights and in optimizer state."""
    yield from _counted(subject, "nans", "holds NaN")


def infinities(subject: Subject) -> Iterator[Problem]:
    """Infinities in weights and in optimizer state."""
    yield from _counted(subject, "infinities", "holds infinities")


def _counted(subject: Subject, what: str, text: str) -> Iterator[Problem]:
    told = 0
    where = subject.directory
    everything = [(m.where, n, s) for m, n, _, s in _weights(subject)] + [(where, n, s) for n, s in subject.state_statistics.items()]
    for place, name, figures in everything:
        count = getattr(figures, what)
        if count:
            told += 1
            if told <= SOME:
                yield Problem(text, place, name, found=f"{count} of {figures.count} elements")
    if told > SOME:
        yield Problem(f"{told - SOME} more tensors: {text}", where)


def all_zero(subject: Subject) -> Iterator[Problem]:
    """Weights that are nothing but zeros. Biases may be, and norms that are stored around zero."""
    for model, name, _, figures in _weights(subject):
        if figures.count and figures.zeros == figures.count and not _may_be_zero(model, name):
            yield Problem("is all zeros", model.where, name, found=f"{figures.count} elements")


def _may_be_zero(model: Model, name: str) -> bool:
    if name.rpartition(".")[2].startswith(("bias", "expert_bias", "e_score_correction_bias", "sinks")) or name.endswith("bias"):
        return True
    args = model.args or {}
    around_zero = not args or args.get("layernorm_zero_centered_gamma") or args.get("apply_layernorm_1p")
    return "norm" in name and bool(around_zero)


def constants(subject: Subject) -> Iterator[Problem]:
    """Matrices of one number: what an initialisation or a placeholder leaves."""
    for model, name, tensor, figures in _weights(subject):
        if len(tensor.global_shape) < 2 or figures.count < 2 or figures.nans or figures.infinities:
            continue
        if figures.minimum and figures.minimum == figures.maximum:
            yield Problem("every element is the same number", model.where, name, found=f"{figures.minimum:g}")


def zero_shards(subject: Subject) -> Iterator[Problem]:
    """A part of a matrix that a rank should have written and that is all zeros."""
    for model, name, tensor, figures in _weights(subject):
        if len(tensor.global_shape) != 2 or not figures.zeros or figures.zeros == figures.count or figures.zeros * 16 < figures.count:
            continue
        for axis, zero in enumerate(_zero_lines(tensor)):
            part = _zero_part(zero)
            if part is not None:
                along = ("rows", "columns")[axis]
                found = f"part {part[0]} of {part[1]}, {along} {part[2]} to {part[3]}"
                yield Problem(f"a whole shard of its {along} is zero: a rank's part was not written", model.where, name, found=found)
                break


def _zero_lines(tensor: TensorMetadata) -> tuple[list[bool], list[bool]]:
    """For each row and each column whether all of it is zero."""
    import numpy as np

    rows, columns = np.ones(tensor.global_shape[0], bool), np.ones(tensor.global_shape[1], bool)
    for offset, shape in boxes(tensor.global_shape, width(tensor)):
        used = (read_box(tensor, offset, shape) != 0).reshape(shape)
        rows[offset[0] : offset[0] + shape[0]] &= ~used.any(axis=1)
        columns[offset[1] : offset[1] + shape[1]] &= ~used.any(axis=0)
    return rows.tolist(), columns.tolist()


def _zero_part(zero: list[bool]) -> tuple[int, int, int, int] | None:
    for parts in PARTS:
        size, rest = divmod(len(zero), parts)
        if rest or not size:
            continue
        for part in range(parts):
            if all(zero[part * size : (part + 1) * size]):
                return part, parts, part * size, (part + 1) * size - 1
    return None


def repeated_shards(subject: Subject) -> Iterator[Problem]:
    """A matrix whose halves, quarters, ... are the same: one rank's shard was written in place of another's."""
    for model, name, tensor, figures in _weights(subject):
        shape = tensor.global_shape
        if len(shape) != 2 or figures.minimum == figures.maximum or tensor.numel < 64:
            continue
        for axis, parts in ((a, p) for a in (0, 1) for p in PARTS[:3] if shape[a] % p == 0 and shape[a] // p > 1):
            equal = _equal_parts(tensor, axis, parts)
            if equal is not None:
                found = f"parts {equal[0]} and {equal[1]} of {parts} along its {('rows', 'columns')[axis]}"
                yield Problem("two shards of it are the same: one rank's was written in place of another's", model.where, name, found=found)
                break


def _equal_parts(tensor: TensorMetadata, axis: int, parts: int) -> tuple[int, int] | None:
    step = tensor.global_shape[axis] // parts
    size = (step, tensor.global_shape[1]) if axis == 0 else (tensor.global_shape[0], step)
    cut = []
    for part in range(parts):
        offset = (part * step, 0) if axis == 0 else (0, part * step)
        chunks = tuple(c.moved((c.global_offset[0] - offset[0], c.global_offset[1] - offset[1])) for c in tensor.region(offset, size))
        cut.append(TensorMetadata(tensor.fqn, tensor.dtype, size, chunks))
    for second in range(1, parts):
        for first in range(second):
            if samples_agree(cut[first], cut[second]) and same_bits(cut[first], cut[second]):
                zeros = not any(bits(read_box(cut[first], o, s)).any() for o, s in boxes(size, width(tensor)))
                return None if zeros else (first, second)
    return None


def equal_experts(subject: Subject) -> Iterator[Problem]:
    """Experts that are copies of one another: upcycled and never trained, or one expert written in place of all."""
    for model in subject.models:
        seen: dict[tuple[object, ...], str] = {}
        told: dict[str, list[str]] = {}
        for name, figures in subject.statistics(model).items():
            if not _EXPERT.search(name) or not figures.count:
                continue
            key = (_EXPERT.sub("#", name), figures.minimum, figures.maximum, figures.mean, figures.zeros)
            if key not in seen:
                seen[key] = name
            elif same_bits(model.tensors[seen[key]], model.tensors[name]):
                told.setdefault(seen[key], []).append(name)
        for first, others in told.items():
            yield Problem("experts are copies of one another", model.where, first, found=", ".join(others[:8]))


def tied_weights(subject: Subject) -> Iterator[Problem]:
    """A head that the config ties to the embedding, or another tensor that the family repeats, stored and different."""
    for model in subject.models:
        for original, copy in model.repeated:
            if not same_bits(model.tensors[original], model.tensors[copy]):
                yield Problem(f"is another name of {original} in this model, and the two are not equal", model.where, copy)


def padding_rows(subject: Subject) -> Iterator[Problem]:
    """Rows after the vocabulary that hold numbers; they take no part in training, some writers leave their initial values."""
    for model in subject.models:
        if model.side != "mcore" or model.dims is None:
            continue
        vocab = model.dims.symbols["V"]
        for name in (EMBEDDING, HEAD):
            tensor = model.tensors.get(name)
            if tensor is None or len(tensor.global_shape) != 2 or tensor.global_shape[0] <= vocab:
                continue
            rows = tensor.global_shape[0] - vocab
            used = any(
                bits(read_box(tensor, (vocab + offset[0], offset[1]), shape)).any()
                for offset, shape in boxes((rows, tensor.global_shape[1]), width(tensor))
            )
            if used:
                yield Problem("padding rows of the vocabulary hold numbers", model.where, name, found=f"{rows} rows after {vocab}")


def masters(subject: Subject) -> Iterator[Problem]:
    """float32 weights of the optimizer that do not round to the model's weights; samples of each, with --deep all elements."""
    state, view = subject.optimizer, subject.optimizer_view
    if state is None or view is None:
        return
    if not subject.deep:
        for note in state.problems:
            yield Problem(note.text, subject.directory, note.subject.partition(",")[0])
        return
    wrong = compare_masters(state.tensors.get(MASTER, {}), view.tensors, sample=None)
    for one in wrong[:SOME]:
        found = f"{one.differing} of {one.looked_at} elements, by up to {one.largest:g}"
        yield Problem("the optimizer's float32 weights do not round to the model's weights", subject.directory, one.name, found=found)
    if len(wrong) > SOME:
        yield Problem(f"float32 weights of {len(wrong) - SOME} more parameters do not round to the model's", subject.directory)


def negative_moments(subject: Subject) -> Iterator[Problem]:
    """Second moments are sums of squares."""
    for name, figures in subject.state_statistics.items():
        if "exp_avg_sq" in name and figures.minimum is not None and figures.minimum < 0:
            yield Problem("a second moment is negative", subject.directory, name, found=f"down to {figures.minimum:g}")


# ---- the same weights twice -------------------------------------------------------------------------------------------------------


def stored_twice(subject: Subject) -> Iterator[Problem]:
    """Weights as safetensors and in Megatron's format."""
    if subject.copies is None:
        return
    wasted = sum(t.nbytes for t in subject.copies[0].values())
    how = "the copies are compared element by element" if subject.deep else "samples of the copies are compared, with --deep all of them"
    yield Problem("the weights are stored twice", subject.directory, found=f"{wasted} bytes too many; {how}")


def copies_differ(subject: Subject) -> Iterator[Problem]:
    """The two copies, under one naming."""
    if subject.copies is None:
        return
    first, second = subject.copies
    for name in sorted(first.keys() ^ second.keys())[:SOME]:
        yield Problem("of the two copies of the weights one lacks a tensor", subject.directory, name)
    for name in first:
        if name in second:
            yield from _differ(name, first, second, subject)


def _differ(name: str, first: Mapping[str, TensorMetadata], second: Mapping[str, TensorMetadata], subject: Subject) -> Iterator[Problem]:
    a, b = first[name], second[name]
    text = "the two copies of a tensor differ (safetensors, Megatron)"
    if a.global_shape != b.global_shape or a.dtype != b.dtype:
        yield Problem(text, subject.directory, name, f"{a.dtype} {list(a.global_shape)}", f"{b.dtype} {list(b.global_shape)}")
    elif subject.deep:
        different = first_difference(a, b)
        if different is not None:
            index, x, y = different
            yield Problem(text, subject.directory, name, expected=f"{x} at {list(index)}", found=y)
    elif not samples_agree(a, b):
        yield Problem(text, subject.directory, name)
