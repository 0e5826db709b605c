"""Ranks, and the names that a rank's own module gives its tensors: stage-local layers, local experts, three forms of experts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import CkptError
from ..layout import ParallelLayout, layer_of

FORMS = ("numbered", "sequential", "grouped")


class Rank(NamedTuple):
    """Which shard: coordinates in the tensor, pipeline, expert and expert-tensor parallel groups. Data and context parallel copies are
    the same shard."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int = 0


def ranks(layout: ParallelLayout) -> tuple[Rank, ...]:
    """The shards of a layout in the order of the global ranks that hold them (of the smallest world with these sizes).

    >>> ranks(ParallelLayout(tp=2, pp=2))
    (Rank(tp=0, pp=0, ep=0, etp=0), Rank(tp=1, pp=0, ep=0, etp=1), Rank(tp=0, pp=1, ep=0, etp=0), Rank(tp=1, pp=1, ep=0, etp=1))

    Source: Megatron-Core 0.16.1 parallel_state.py, rank order tp-cp-ep-dp-pp for both groups.
    """
    etp = layout.expert_tp
    return tuple(Rank(i % layout.tp, pp, i // etp % layout.ep, i % etp) for pp in range(layout.pp) for i in range(layout.stage_ranks))


@dataclass(frozen=True, slots=True)
class Stages:
    """Where decoder layers live. chunks[pp][chunk] = global layers in order (one chunk per virtual stage); places = global layer ->
    (pp, chunk, local layer)."""

    chunks: tuple[tuple[tuple[int, ...], ...], ...]
    places: dict[int, tuple[int, int, int]]

    @property
    def last(self) -> tuple[int, int]:
        """(pp, chunk) at the end of the pipeline."""
        return len(self.chunks) - 1, len(self.chunks[-1]) - 1

    def place(self, layer: int) -> tuple[int, int, int]:
        """(pp, chunk, local layer) of a global layer."""
        if layer not in self.places:
            raise CkptError("E402", f"layer {layer} lies on no pipeline stage", expected=f"one of {len(self.places)} layers")
        return self.places[layer]


def stages(layout: ParallelLayout, layers: int) -> Stages:
    """Stages of a model with `layers` decoder layers, as the layout places them. E402 when they cannot be split."""
    found = layout.stages(layers)
    chunks = tuple(tuple(tuple(found[pp, chunk]) for chunk in sorted(c for p, c in found if p == pp)) for pp in range(layout.pp))
    places = {layer: (pp, chunk, local) for (pp, chunk), held in found.items() for local, layer in enumerate(held)}
    return Stages(chunks, places)


@dataclass(frozen=True, slots=True)
class Held:
    """What a name in a shard stands for. name: canonical spelling; form: how the experts are stored, None for other tensors; expert: the
    number in the name, None without one ("grouped" holds all of a rank); mixture: the name up to "mlp.", "" without experts."""

    name: str
    form: str | None = None
    expert: int | None = None
    mixture: str = ""


_NUMBERED = re.compile(r"((?:.*\.)?mlp\.)experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_SEQUENTIAL = re.compile(r"((?:.*\.)?mlp\.)experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_GROUPED = re.compile(r"((?:.*\.)?mlp\.)experts\.weight([12])")
_LAYER = re.compile(r"((?:^|\.)decoder\.layers\.)(\d+)(?=\.)")
_CHUNK = re.compile(r"model(\d+)\.")


def held(name: str) -> Held:
    """The tensor that a name stands for; chunk, layer and expert numbers stay as they are. A grouped one is called after its expert 0."""
    if match := _NUMBERED.fullmatch(name):
        return Held(name, "numbered", int(match[3]), match[1])
    if match := _SEQUENTIAL.fullmatch(name):
        return Held(f"{match[1]}experts.{match[3]}{match[2]}", "sequential", int(match[2]), match[1])
    if match := _GROUPED.fullmatch(name):
        return Held(f"{match[1]}experts.linear_fc{match[2]}.weight0", "grouped", None, match[1])
    return Held(name)


def shown(name: str, form: str, number: int) -> str:
    """The name that `form` gives a canonical expert tensor, numbered `number`. E305 for a bias in the grouped form, which has none."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        raise CkptError("E490", "not the tensor of an expert", where=name)
    mixture, tail = match[1], match[2]
    if form == "numbered":
        return f"{mixture}experts.{tail}{number}"
    if form == "sequential":
        return f"{mixture}experts.local_experts.{number}.{tail}"
    if not tail.endswith("weight"):
        raise CkptError("E305", "grouped experts have no biases", where=name, hint="choose expert_form='numbered' or 'sequential'")
    return f"{mixture}experts.weight{'1' if 'fc1' in tail else '2'}"


def renumbered(name: str, layer: int | None = None, expert: int | None = None) -> str:
    """The name with its decoder layer or its expert number replaced."""
    if layer is not None:
        name = _LAYER.sub(lambda m: f"{m[1]}{layer}", name)
    match = _NUMBERED.fullmatch(name)
    return f"{match[1]}experts.{match[2]}{expert}" if match and expert is not None else name


def split_chunk(name: str) -> tuple[int, str]:
    """("model1.decoder...") -> (1, "decoder..."); a name without prefix is of chunk 0."""
    match = _CHUNK.match(name)
    return (int(match[1]), name[match.end() :]) if match else (0, name)


def layer_count(shards: Mapping[Rank, Iterable[str]], local: bool) -> int:
    """Decoder layers in all shards together; local = names number layers from 0 in every stage and chunk."""
    if not local:
        return 1 + max((n for names in shards.values() for n in map(layer_of, names) if n is not None), default=-1)
    found = {(rank.pp, chunk, layer_of(rest)) for rank, names in shards.items() for chunk, rest in map(split_chunk, names)}
    return sum(layer is not None for _, _, layer in found)


def experts_by_mixture(names: Iterable[str]) -> dict[str, int]:
    """Mixture -> number of experts (highest number + 1) among canonical names."""
    counts: dict[str, int] = {}
    for name in names:
        item = held(name)
        if item.expert is not None:
            counts[item.mixture] = max(counts.get(item.mixture, 0), item.expert + 1)
    return counts
