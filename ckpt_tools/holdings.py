"""Who holds what: the boxes of every tensor on every rank of a parallel layout.

Sources: Megatron-LM gpt_model.py, transformer_block.py has_final_layernorm_in_this_stage, multi_token_prediction.py (0.13 to 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import CkptError
from .layout import ParallelLayout, expand_pipeline, expert_count, expert_of, is_expert, layer_of, rank_box
from .memory.names import Rank, ranks
from .model_names import EMBEDDING, HEAD
from .tensors import Shape, TensorMetadata

Stage = tuple[int, int]  # pipeline stage, virtual stage


@dataclass(frozen=True, slots=True)
class Structure:
    """What of a model decides who holds what: decoder layers, whether linear_fc1 is [gate; up], whether the head is the embedding."""

    layers: int
    gated: bool
    tied: bool


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a tensor.

    name   the canonical tensor.      local  its name in the rank's own model: stage-local layer and rank-local expert number.
    chunk  the virtual stage.         boxes  (offset, shape) in the tensor in the order in which the rank keeps them: one, or gate and up.
    copy   whether an earlier rank holds the same.
    """

    name: str
    local: str
    chunk: int
    boxes: tuple[tuple[Shape, Shape], ...]
    copy: bool

    @property
    def shape(self) -> Shape:
        """Shape of the rank's tensor: gate and up stand one after the other."""
        shape = self.boxes[0][1]
        return (sum(box[0] for _, box in self.boxes), *shape[1:]) if len(self.boxes) > 1 else shape


def holdings(layout: ParallelLayout, tensors: Mapping[str, TensorMetadata], structure: Structure) -> dict[Rank, tuple[Held, ...]]:
    """What each rank of `layout` holds of canonical tensors, ranks in the order of their numbers; data-parallel copies count once.

    The boxes that are no copies cover each tensor exactly once. Errors: E402/E403 sizes that cannot be spread or cut.
    """
    experts = expert_count(tensors)
    if experts % layout.ep:
        raise CkptError("E403", f"{experts} experts cannot be spread over ep {layout.ep}")
    per_rank = experts // layout.ep
    placed = {s: [(n, local, expert_of(n)) for n, local in names] for s, names in stage_names(layout, tensors, structure).items()}
    result: dict[Rank, tuple[Held, ...]] = {}
    seen: set[tuple[str, tuple[tuple[Shape, Shape], ...]]] = set()
    for rank in ranks(layout):
        held = []
        for (pp, chunk), names in placed.items():
            for name, local, expert in names if pp == rank.pp else ():
                if expert is not None:
                    if expert // per_rank != rank.ep:
                        continue
                    local = f"{local[: -len(str(expert))]}{expert - rank.ep * per_rank}"
                size, position = (layout.expert_tp, rank.etp) if is_expert(name) else (layout.tp, rank.tp)
                boxes = rank_box(name, tensors[name].global_shape, size, position, structure.gated)
                held.append(Held(name, local, chunk, boxes, (name, boxes) in seen))
                seen.add((name, boxes))
        result[rank] = tuple(held)
    return result


def stage_names(layout: ParallelLayout, names: Iterable[str], structure: Structure) -> dict[Stage, list[tuple[str, str]]]:
    """(pipeline stage, virtual stage) -> (canonical name, name there) of the tensors that its ranks hold a part of.

    Experts keep their global numbers here. A head that is the embedding is a copy of it on the last stage. E402 for a name that ckpt
    does not know the stage of.
    """
    listed = list(names)
    stages = layout.stages(structure.layers)
    first, last = (0, 0), (layout.pp - 1, layout.virtual - 1)
    extra = mtp_stage(layout) if any(n.startswith("mtp.") for n in listed) else None
    ends = [stage for stage, held in stages.items() if held and structure.layers - 1 in held]
    norm = ends[0] if extra is not None and ends else last
    local = {layer: (stage, number) for stage, held in stages.items() for number, layer in enumerate(held)}
    result: dict[Stage, list[tuple[str, str]]] = {stage: [] for stage in stages}
    for name in listed:
        layer = layer_of(name) if name.startswith("decoder.layers.") else None
        if layer is not None:
            if layer not in local:
                raise CkptError("E402", f"{name} lies beyond the last layer", where=name, expected=f"{structure.layers} layers")
            stage, number = local[layer]
            result[stage].append((name, re.sub(r"^decoder\.layers\.\d+\.", f"decoder.layers.{number}.", name)))
        elif name.startswith("embedding."):
            for stage in dict.fromkeys((first, extra or first)):
                result[stage].append((name, name))
        elif name.startswith("mtp."):
            result[extra or last].append((name, name))
        elif name.startswith("decoder.final_layernorm."):
            result[norm].append((name, name))
        elif name.startswith("output_layer.") or first == last:
            result[last].append((name, name))
        else:
            raise CkptError(
                "E402", f"ckpt does not know which pipeline stage holds {name}", where=name, hint="--pp 1 keeps all in one stage"
            )
    if structure.tied and last != first and HEAD not in listed and EMBEDDING in listed:
        result[last].append((EMBEDDING, HEAD))
    return result


def mtp_stage(layout: ParallelLayout) -> Stage:
    """(pipeline stage, virtual stage) of the multi-token-prediction layers: the last, unless a layout string says otherwise."""
    if layout.pipeline is not None:
        for index, text in enumerate(expand_pipeline(layout.pipeline)):
            if "m" in text:
                return index % layout.pp, index // layout.pp
    return layout.pp - 1, layout.virtual - 1
