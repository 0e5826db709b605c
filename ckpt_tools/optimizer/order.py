"""Which parameters each rank registered, in which order, and which box of which canonical tensor each of them is.

The distributed optimizer stores parameters without names, in the order in which the model's modules were built. Sources: Megatron-LM
gpt_model.py, transformer_layer.py, attention.py, multi_latent_attention.py, mlp.py, moe/*.py, multi_token_prediction.py (0.8 to 0.19);
Transformer Engine module/layernorm_linear.py, grouped_linear.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ..errors import CkptError
from ..holdings import Structure, stage_names
from ..layout import ParallelLayout, cut_of, expert_count, expert_of, is_expert, outside, rank_boxes
from ..memory.names import Rank
from ..model_names import EMBEDDING, GROUPED, HEAD, SEQUENTIAL
from ..tensors import Shape, TensorMetadata


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a local parameter that belongs to one canonical tensor.

    start   first element in the parameter's row-major bytes.   stored  shape of the part as stored there (contiguous).
    turned  whether the tensor is the transpose of what is stored.
    boxes   (offset in the part, after transposing; offset in the canonical tensor; shape).
    """

    name: str
    start: int
    stored: Shape
    turned: bool
    boxes: tuple[tuple[Shape, Shape, Shape], ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of one rank: its pieces, number of elements, dtype, whether it is an expert's, whether DDP gives it a bucket of its own
    (`shared`: an embedding that exists on two pipeline stages), and whether another rank's copy counts (`copy`)."""

    name: str
    pieces: tuple[Piece, ...]
    numel: int
    dtype: str
    expert: bool
    shared: bool
    copy: bool


_NOT_PARAMETERS = (".expert_bias", "._extra_state", ".local_tokens_per_expert", ".global_tokens_per_expert", ".ga_steps")


def is_parameter(name: str) -> bool:
    """Whether a tensor of a model is trained by the optimizer (buffers, such as the router's expert_bias, and parts that are
    carried along are not)."""
    return not name.endswith(_NOT_PARAMETERS) and not outside(name)


_INNER = (
    r"input_layernorm\.weight",
    r"input_layernorm\.bias",
    r"self_attention\.core_attention\..*",
    r"self_attention\.linear_proj\.weight",
    r"self_attention\.linear_proj\.bias",
    r"self_attention\.linear_qkv\.layer_norm_weight",
    r"self_attention\.linear_qkv\.layer_norm_bias",
    r"self_attention\.linear_qkv\.weight",
    r"self_attention\.linear_qkv\.bias",
    r"self_attention\.linear_q_proj\..*",
    r"self_attention\.linear_q_down_proj\..*",
    r"self_attention\.linear_q_up_proj\.layer_norm_weight",
    r"self_attention\.linear_q_up_proj\.weight",
    r"self_attention\.linear_kv_down_proj\..*",
    r"self_attention\.linear_kv_up_proj\.layer_norm_weight",
    r"self_attention\.linear_kv_up_proj\.weight",
    r"self_attention\.q_layernorm\.weight",
    r"self_attention\.q_layernorm\.bias",
    r"self_attention\.(k|kv)_layernorm\.weight",
    r"self_attention\.(k|kv)_layernorm\.bias",
    r"pre_mlp_layernorm\.weight",
    r"pre_mlp_layernorm\.bias",
    r"mlp\.router\.weight",
    r"mlp\.router\.bias",
    r"mlp\.linear_fc1\.layer_norm_weight",
    r"mlp\.linear_fc1\.layer_norm_bias",
    r"mlp\.linear_fc1\.weight",
    r"mlp\.linear_fc1\.bias",
    r"mlp\.linear_fc2\.weight",
    r"mlp\.linear_fc2\.bias",
    r"mlp\.fc1_latent_proj\..*",
    r"mlp\.fc2_latent_proj\..*",
    r"mlp\.experts\..*",
    r"mlp\.shared_experts\.gate_weight",
    r"mlp\.shared_experts\.linear_fc1\.weight",
    r"mlp\.shared_experts\.linear_fc2\.weight",
)
_INNER_PATTERNS = tuple(re.compile(p) for p in _INNER)
_TOP = (
    r"embedding\.word_embeddings\.weight",
    r"embedding\.position_embeddings\.weight",
    r"embedding\.tokentype_embeddings\.weight",
    r"decoder\.layers\..*",
    r"decoder\.final_layernorm\.weight",
    r"decoder\.final_layernorm\.bias",
    r"mtp\.layers\..*",
    r"output_layer\.weight",
    r"output_layer\.bias",
)
_TOP_PATTERNS = tuple(re.compile(p) for p in _TOP)
_MTP = (
    r"enorm\.weight",
    r"enorm\.bias",
    r"hnorm\.weight",
    r"hnorm\.bias",
    r"eh_proj\.weight",
    r"transformer_layer\..*",
    r"final_layernorm\.weight",
    r"final_layernorm\.bias",
)
_MTP_PATTERNS = tuple(re.compile(p) for p in _MTP)


def _number(patterns: tuple[re.Pattern[str], ...], text: str, name: str) -> int:
    for number, pattern in enumerate(patterns):
        if pattern.fullmatch(text):
            return number
    raise CkptError(
        "E226",
        f"ckpt does not know where {name} stands among the parameters of its layer",
        where=name,
        hint="without the order of the parameters a flat optimizer buffer cannot be cut; save the run as fully_reshardable",
    )


def _local_spelling(inner: str) -> str:
    """Name within its layer as a local spec registers it: norms are modules of their own, before what they feed."""
    inner = inner.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return re.sub(r"^mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm.", inner)


def _inner_key(inner: str, spec: str, experts: str, name: str) -> tuple[int, ...]:
    number = _number(_INNER_PATTERNS, _local_spelling(inner) if spec == "local" else inner, name)
    expert = re.fullmatch(r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)", inner)
    if expert is None:
        return (number,)
    matrix, kind, index = int(expert[1]), int(expert[2] == "bias"), int(expert[3])
    return (number, index, matrix, kind) if experts == SEQUENTIAL else (number, matrix, index, kind)


def registration_key(name: str, spec: str, experts: str) -> tuple[int, ...]:
    """Sort key that puts canonical names into the order of `named_parameters()`. spec "te" or "local"; experts one of the three forms."""
    top = _number(_TOP_PATTERNS, name, name)
    layer = re.match(r"(?:decoder|mtp)\.layers\.(\d+)\.(.+)", name)
    if layer is None:
        return (top,)
    number, inner = int(layer[1]), layer[2]
    if name.startswith("mtp."):
        place = _number(_MTP_PATTERNS, inner, name)
        deeper = inner.removeprefix("transformer_layer.")
        return (top, number, place, *(_inner_key(deeper, spec, experts, name) if deeper != inner else ()))
    return (top, number, *_inner_key(inner, spec, experts, name))


def local_parameter(
    tensor: TensorMetadata, layout: ParallelLayout, gated: bool, rank: Rank, *, shared: bool = False, copy: bool = False
) -> Parameter:
    """What one rank holds of a canonical tensor, cut by tensor parallelism (experts: by expert tensor parallelism)."""
    expert = is_expert(tensor.fqn)
    size, own = (layout.expert_tp, rank.etp) if expert else (layout.tp, rank.tp)
    whole = cut_of(tensor.fqn, gated) is None
    boxes, at, shape = [], 0, tensor.global_shape
    for holder, offset, box in rank_boxes(tensor.fqn, tensor.global_shape, size, gated):
        if whole or holder == own:
            boxes.append(((at, *(0 for _ in box[1:])) if box else (), offset, box))
            at += box[0] if box else 1
            shape = (at, *box[1:]) if box else ()
    piece = Piece(tensor.fqn, 0, shape, False, tuple(boxes))
    return Parameter(tensor.fqn, (piece,), prod(shape), tensor.dtype, expert, shared, copy or (whole and own > 0))


def grouped_parameters(parameters: list[Parameter]) -> list[Parameter]:
    """Expert parameters of one layer and rank, in order of expert and matrix, as GroupedMLP's two: weight1, weight2.

    weight1 holds (hidden, 2 x ffn) per expert, weight2 (ffn, hidden): each the transpose of the canonical tensor.
    """
    result = []
    for matrix in ("linear_fc1", "linear_fc2"):
        parts = [p for p in parameters if f".{matrix}." in p.name]
        if not parts:
            continue
        pieces, start = [], 0
        for part in parts:
            piece = part.pieces[0]
            pieces.append(Piece(piece.name, start, piece.stored[::-1], True, piece.boxes))
            start += part.numel
        head = parts[0].name.partition(".linear_fc")[0]
        result.append(Parameter(f"{head}.weight{matrix[-1]}", tuple(pieces), start, parts[0].dtype, True, False, parts[0].copy))
    return result


@dataclass(frozen=True, slots=True)
class Model:
    """What is needed to know every rank's parameters: canonical tensors, the writer's layout, [gate; up] or not, tied or not, layers."""

    tensors: Mapping[str, TensorMetadata]
    layout: ParallelLayout
    gated: bool
    tied: bool
    layers: int


def rank_parameters(model: Model, rank: Rank, spec: str, experts: str) -> list[list[Parameter]]:
    """Parameters of one rank per model chunk (virtual stage), in registration order. E402 for a name whose stage ckpt does not know."""
    layout = model.layout
    per_rank = expert_count(model.tensors) // layout.ep
    doubled = layout.pp > 1 and (model.tied or any(n.startswith("mtp.") for n in model.tensors))
    held = stage_names(layout, filter(is_parameter, model.tensors), Structure(model.layers, model.gated, model.tied))
    chunks: list[list[Parameter]] = []
    for stage in sorted(s for s in held if s[0] == rank.pp):
        found: list[Parameter] = []
        for source, name in sorted(_global(held[stage]), key=lambda pair: registration_key(pair[1], spec, experts)):
            expert = expert_of(name)
            if expert is not None and expert // per_rank != rank.ep:
                continue
            shared, copy = doubled and source == EMBEDDING, source == EMBEDDING and stage != (0, 0)
            parameter = local_parameter(model.tensors[source], layout, model.gated, rank, shared=shared, copy=copy)
            found.append(replace(parameter, name=name))
        chunks.append(_merged(found) if experts == GROUPED else found)
    return chunks


def _global(names: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(canonical tensor, its name as a parameter): the same, but for a head that is a copy of the embedding."""
    return ((name, HEAD if local == HEAD else name) for name, local in names)


def _merged(parameters: list[Parameter]) -> list[Parameter]:
    result: list[Parameter] = []
    pending: list[Parameter] = []
    for parameter in parameters:
        layer = parameter.name.partition(".mlp.experts.")[0]
        if pending and (not parameter.expert or pending[0].name.partition(".mlp.experts.")[0] != layer):
            result.extend(grouped_parameters(pending))
            pending = []
        if parameter.expert:
            pending.append(parameter)
        else:
            result.append(parameter)
    return result + (grouped_parameters(pending) if pending else [])
