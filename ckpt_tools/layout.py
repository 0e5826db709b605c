"""Which rank holds which box of which tensor: tensor, pipeline and expert parallel layouts of Megatron-Core.

Sources: Megatron-LM parallel_state.py (rank order tp-cp-ep-dp-pp), transformer_layer.py get_transformer_layer_offset, mlp.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CkptError
from .model_names import EXPERT
from .tensors import Shape


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of a parallel layout. tp tensor, pp pipeline, vpp virtual stages per pipeline rank, ep expert, etp expert tensor
    (None = tp, as in Megatron), cp context, dp data (which experts are spread over, as in Megatron: EP is no further axis).

    first_layers, last_layers  decoder layers of the first / last pipeline stage when they differ from the others.
    pipeline  a layout string as Megatron takes it ("Et*3|(t*4|)*2t*3L"): E embedding, t a layer, m an MTP layer, L the loss; stages are
    separated by |, in the order in which activations pass them.
    count_embedding, count_loss  the embedding / the loss counts as a layer when layers are spread evenly (Megatron's
    account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split).
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    dp: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    pipeline: str | None = None
    count_embedding: bool = False
    count_loss: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise CkptError("E401", f"--{name} must be at least 1", found=str(size))
        if self.pp == 1 and self.vpp > 1:
            raise CkptError(
                "E401", "virtual stages need more than one pipeline stage", expected="--pp 2 or more", found=f"--vpp {self.vpp}"
            )
        uneven = self.first_layers is not None or self.last_layers is not None
        counted = self.count_embedding or self.count_loss
        if uneven + counted + (self.pipeline is not None) > 1:
            raise CkptError(
                "E401",
                "the layers can be spread in one way only",
                expected="sizes of the first and last stage, or the embedding and loss counted as layers, or a pipeline layout",
            )

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def virtual(self) -> int:
        """Virtual stages per pipeline rank: vpp, or what the pipeline layout string says."""
        return self.vpp if self.pipeline is None else max(1, len(expand_pipeline(self.pipeline)) // self.pp)

    def arguments(self) -> dict[str, Any]:
        """The layout under the names of Megatron's arguments. Experts are spread over data-parallel ranks, so that there are at least as
        many of these as expert parallelism needs."""
        dense = self.tp * self.cp
        stage = math.lcm(dense * self.dp, self.ep * self.expert_tp)
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tp,
            "data_parallel_size": stage // dense,
            "world_size": stage * self.pp,
            "virtual_pipeline_model_parallel_size": self.virtual if self.virtual > 1 else None,
            "decoder_first_pipeline_num_layers": self.first_layers,
            "decoder_last_pipeline_num_layers": self.last_layers,
            "account_for_embedding_in_pipeline_split": self.count_embedding,
            "account_for_loss_in_pipeline_split": self.count_loss,
            "pipeline_model_parallel_layout": self.pipeline,
        }

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage that hold different things: the smallest number that both tp and ep x etp divide."""
        return math.lcm(self.tp, self.ep * self.expert_tp)

    def stages(self, layers: int) -> dict[tuple[int, int], list[int]]:
        """(pipeline stage, virtual stage) -> the global decoder layers it holds. E402 when they do not add up."""
        if self.pipeline is not None:
            counts = [text.count("t") for text in expand_pipeline(self.pipeline)]
            if len(counts) % self.pp or (self.vpp > 1 and len(counts) != self.pp * self.vpp):
                raise CkptError(
                    "E402",
                    "the pipeline layout does not fit the pipeline size",
                    expected=f"{self.pp * self.vpp} stages" if self.vpp > 1 else f"a multiple of {self.pp} stages",
                    found=f"{len(counts)}",
                )
        else:
            counts = self._even(layers)
        if sum(counts) != layers:
            raise CkptError(
                "E402", "the pipeline stages do not hold all layers", expected=f"{layers} layers", found=f"{' + '.join(map(str, counts))}"
            )
        result, start = {}, 0
        for index, count in enumerate(counts):
            result[index % self.pp, index // self.pp] = list(range(start, start + count))
            start += count
        return result

    def _even(self, layers: int) -> list[int]:
        """Layers of each virtual stage, in the order in which activations pass them."""
        parts = self.pp * self.vpp
        if self.first_layers is None and self.last_layers is None:
            counted = layers + self.count_embedding + self.count_loss
            if counted % parts:
                raise CkptError(
                    "E402",
                    f"{counted} layers cannot be split evenly over pp {self.pp} x vpp {self.vpp}",
                    hint="give --pipeline-layout, or other sizes for the first and last stage",
                )
            counts = [counted // parts] * parts
            counts[0] -= self.count_embedding
            counts[-1] -= self.count_loss
            return counts
        fixed = {i: n for i, n in ((0, self.first_layers), (self.pp - 1, self.last_layers)) if n is not None}
        rest, left = self.pp - len(fixed), layers - sum(fixed.values())
        if left < 0 or (rest == 0 and left) or (rest and left % rest):
            raise CkptError(
                "E402",
                "the pipeline stages do not hold all layers",
                expected=f"{layers} layers",
                found=f"{fixed} and {left} for the {rest} other stages",
            )
        per_stage = [fixed.get(i, left // rest if rest else 0) for i in range(self.pp)]
        if any(n % self.vpp for n in per_stage):
            raise CkptError(
                "E402", "a stage's layers cannot be split evenly over its virtual stages", found=f"{per_stage} layers, vpp {self.vpp}"
            )
        return [per_stage[i % self.pp] // self.vpp for i in range(parts)]


def expand_pipeline(text: str) -> list[str]:
    """A pipeline layout string as one string of E, t, m, L per stage: "Et*2|(t|)*2L" -> ["Ett", "t", "t", "L"]. E402 for other letters.

    Source: megatron-core 0.16 pipeline_parallel_layer_layout.py (commas are ignored, x*n repeats a letter or a bracket).
    """
    bare = text.replace(",", "").replace(" ", "")
    while match := re.search(r"\(([^()]*)\)\*(\d+)|([EtmL|])\*(\d+)", bare):
        body, times = (match[1], match[2]) if match[2] else (match[3], match[4])
        if int(times) > 10_000 or len(bare) > 100_000:
            raise CkptError("E402", "the pipeline layout is too long", found=text[:80])
        bare = bare[: match.start()] + body * int(times) + bare[match.end() :]
    if re.fullmatch(r"[EtmL|]*", bare) is None:
        raise CkptError("E402", "the pipeline layout cannot be understood", expected="E, t, m, L, |, (...)*n", found=text[:80])
    return bare.split("|")


# How tensor parallelism cuts a canonical Megatron tensor: axis 0 or 1, "glu" = gate and up halves of axis 0 each on their own.
_CUTS: tuple[tuple[re.Pattern[str], int | str], ...] = tuple(
    (re.compile(pattern), cut)
    for pattern, cut in (
        (r".*word_embeddings\.weight", 0),
        (r".*output_layer\.(weight|bias)", 0),
        (r".*linear_qkv\.(weight|bias)", 0),
        (r".*linear_q_proj\.weight|.*linear_q_up_proj\.weight|.*linear_kv_up_proj\.weight", 0),
        (r".*core_attention\.softmax_offset", 0),
        (r".*linear_proj\.weight|.*linear_fc2\.weight\d*|.*out_proj\.weight", 1),
        (r".*linear_fc1\.(weight|bias)\d*", "glu"),
        (r".*eh_proj\.weight", 0),
    )
)


def cut_of(name: str, gated: bool) -> int | str | None:
    """How TP cuts the tensor: an axis, "glu", or None for a tensor that every rank holds whole."""
    if outside(name):
        return None
    for pattern, cut in _CUTS:
        if pattern.fullmatch(name):
            return 0 if cut == "glu" and not gated else cut
    return None


_OWN = re.compile(r"(?:^|\.)(?:decoder|embedding|output_layer|mtp|encoder)\.")


def outside(name: str) -> bool:
    """Whether a tensor is none of Megatron's own model: it belongs to a part that is kept under its HF names, whole on every rank."""
    return _OWN.search(name) is None


def is_expert(name: str) -> bool:
    """Whether the tensor belongs to a routed expert (cut by ETP, spread by EP)."""
    return ".mlp.experts." in name


def rank_boxes(name: str, shape: Shape, tp: int, gated: bool) -> list[tuple[int, Shape, Shape]]:
    """(tp rank, offset, shape) of the boxes that the ranks hold; one or, for gate and up, two per rank. A tensor every rank holds
    whole is listed for rank 0 only. E403 when a size is not divisible."""
    if cut_of(name, gated) is None or not shape:
        return [(0, (0,) * len(shape), shape)]
    boxes = [(rank, *box) for rank in range(tp) for box in rank_box(name, shape, tp, rank, gated)]
    return sorted(boxes, key=lambda b: b[1])


def rank_box(name: str, shape: Shape, tp: int, rank: int, gated: bool) -> tuple[tuple[Shape, Shape], ...]:
    """(offset, shape) of what one rank holds: a box, or two for gate and up; all of a tensor that is not cut. E403 as rank_boxes."""
    cut = cut_of(name, gated)
    if cut is None or not shape:
        return (((0,) * len(shape), shape),)
    axis, halves = (0, 2) if cut == "glu" else (int(cut), 1)
    size = shape[axis] if axis < len(shape) else 0
    if not size or size % (halves * tp):
        raise CkptError(
            "E403",
            f"{name} cannot be cut for tp {tp}",
            where=name,
            expected=f"{size // halves} divisible by {tp}",
            found=f"shape {list(shape)}, axis {axis}",
        )
    step = size // (halves * tp)
    box = (*shape[:axis], step, *shape[axis + 1 :])
    starts = ((half * tp + rank) * step for half in range(halves))
    return tuple((tuple(start if i == axis else 0 for i in range(len(shape))), box) for start in starts)


_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Global decoder layer of a canonical name, or None."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> int | None:
    """Global expert number of a canonical name, or None."""
    match = EXPERT.match(name)
    return int(match["expert"]) if match else None


def expert_count(names: Iterable[str]) -> int:
    """Number of routed experts of a layer."""
    return 1 + max((e for e in map(expert_of, names) if e is not None), default=-1)


def first_layers(counts: Mapping[tuple[int, int], int], pp: int) -> dict[tuple[int, int], int]:
    """First global layer of each (pipeline stage, virtual stage) from how many layers each holds: activations pass virtual stage 0 of
    all pipeline stages, then virtual stage 1."""
    offsets, total = {}, 0
    for chunk in range(1 + max((c for _, c in counts), default=0)):
        for stage in range(pp):
            offsets[stage, chunk] = total
            total += counts.get((stage, chunk), 0)
    return offsets
