"""Who holds what: for each rank of a layout its part of the model and of the optimizer state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from ..dtypes import DTYPES
from ..errors import CkptError
from ..families.family import is_carried
from ..families.megatron_args import is_gated
from ..holdings import Held, Structure, holdings
from ..layout import ParallelLayout, expert_of, layer_of
from ..options import ConvertOptions
from ..tensors import TensorMetadata
from ..views import View, as_mcore
from ..vocabulary import padded_rows, repad
from .overview import Opened
from .tensors import matches

EMBEDDING, NORM, HEAD = "embedding", "final norm", "output layer"


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of one part of the model: in which virtual stages, and which of its experts."""

    chunks: tuple[int, ...]
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank holds, copies of other ranks' tensors included; ranks are numbered as in the smallest world of these sizes.

    optimizer_nbytes  of all its data-parallel copies together; None when the state cannot be read.
    pieces            part of the model ("embedding", "layer 3", ...) -> what the rank holds of it.
    """

    rank: int
    tp: int
    pp: int
    ep: int
    etp: int
    tensors: int
    parameters: int
    nbytes: int
    optimizer_nbytes: int | None
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    pieces: dict[str, Piece]


@dataclass(frozen=True, slots=True)
class Shares:
    """All ranks of a layout; parts: the parts of the model in the order in which activations pass them; warnings: what was not counted."""

    layout: ParallelLayout
    ranks: tuple[RankShare, ...]
    parts: tuple[str, ...]
    warnings: tuple[str, ...]


def rank_shares(opened: Opened, layout: ParallelLayout, *, as_stored: bool, pattern: str | None = None) -> Shares:
    """What each rank of `layout` holds; reads headers only.

    as_stored  whether it is the layout of the run that wrote the checkpoint: the vocabulary is padded as stored, else as by reshard.
    pattern    count only canonical Megatron names that match.
    Errors: E402/E403 the model cannot be spread or cut in this way; E3xx as as_mcore.
    """
    view = as_mcore(opened.model, allow_unrepresentable=True)
    state, warnings = _optimizer(opened, view)
    if not as_stored or opened.model.format == "hf":
        view = repad(view, padded_rows(view, ConvertOptions(to="torch", layout=layout)))
    structure = Structure(view.dims.layers, is_gated(view.args), view.dims.tied)
    beside = [n for n in view.tensors if view.family and is_carried(view.family, n)]
    if beside:
        told = "tensors that Megatron's GPT model does not have belong to no rank and are not counted"
        warnings.append(f"{len(beside)} {told}: {beside[0]}, ...")
    spread = {n: t for n, t in view.tensors.items() if n not in set(beside)}
    found = []
    for number, (rank, held) in enumerate(holdings(layout, spread, structure).items()):
        mine = [h for h in held if matches(h.name, pattern)]
        parameters = sum(_elements(h) for h in mine)
        nbytes = sum(_bytes(h, view.tensors[h.name]) for h in mine)
        of_state = None if state is None else sum(_bytes(h, named[h.name]) for h in mine for named in state if h.name in named)
        layers = sorted({n for h in mine if (n := layer_of(h.name)) is not None})
        experts = sorted({e for h in mine if (e := expert_of(h.name)) is not None})
        found.append(RankShare(number, *rank, len(mine), parameters, nbytes, of_state, tuple(layers), tuple(experts), _pieces(mine)))
    parts = sorted({p for share in found for p in share.pieces}, key=_place)
    return Shares(layout, tuple(found), tuple(parts), tuple(warnings))


def _optimizer(opened: Opened, view: View) -> tuple[list[Mapping[str, TensorMetadata]] | None, list[str]]:
    """Each state's tensors by the name of the parameter; None when they cannot be read, and why."""
    if not opened.of_optimizer() and opened.state.format != "torch":
        return [], []
    from ..optimizer.reading import read_optimizer

    try:
        return list(read_optimizer(opened.state, view, check_values=False).tensors.values()), []
    except CkptError as error:
        return None, [f"the optimizer state is not counted: {error.what} ({error.where})"]


def _elements(held: Held) -> int:
    return sum(prod(shape) for _, shape in held.boxes)


def _bytes(held: Held, tensor: TensorMetadata) -> int:
    return _elements(held) * DTYPES[tensor.dtype].bits // 8


def _pieces(held: Iterable[Held]) -> dict[str, Piece]:
    found: dict[str, tuple[set[int], set[int]]] = {}
    for h in held:
        chunks, experts = found.setdefault(part_of(h), (set(), set()))
        chunks.add(h.chunk)
        number = expert_of(h.name)
        if number is not None:
            experts.add(number)
    return {part: Piece(tuple(sorted(chunks)), tuple(sorted(experts))) for part, (chunks, experts) in found.items()}


_NAMED = ((EMBEDDING, "embedding."), (NORM, "decoder.final_layernorm."), (HEAD, "output_layer."))
_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.")


def part_of(held: Held) -> str:
    """The part of the model that a tensor belongs to; a head that is a copy of the embedding is called what it serves as."""
    layer = layer_of(held.name)
    if layer is not None:
        return f"layer {layer}"
    match = _PREDICTION.match(held.name)
    if match:
        return f"prediction layer {match[1]}"
    return next((part for part, prefix in _NAMED if held.local.startswith(prefix)), held.local.rpartition(".")[0] or held.local)


def _place(part: str) -> tuple[int, int, str]:
    kind, _, number = part.rpartition(" ")
    order = {EMBEDDING: 0, "layer": 1, "prediction layer": 3, NORM: 2, HEAD: 5}
    return order.get(kind if number.isdigit() else part, 4), int(number) if number.isdigit() else 0, part
