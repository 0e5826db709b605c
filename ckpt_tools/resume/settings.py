"""What an experiment is made of, as a person asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import CkptError, nearest
from ..layout import ParallelLayout
from ..reshard import LayoutChanges

INJECTIONS = {
    "drop-optimizer": "the optimizer's state is not loaded",
    "drop-step": "the optimizer's step count starts again",
    "drop-scheduler": "the learning-rate schedule starts again",
    "drop-rng": "random states are not restored",
    "stale-master": "the float32 weights are those of an earlier step",
    "shift-moments": "moments belong to other parameters",
    "wrong-iteration": "the iteration before is loaded",
    "swap-gate-up": "the two halves of linear_fc1 are exchanged",
    "skip-sample": "the data goes on one sample too far",
    "dup-weights": "an older copy of the weights lies beside the checkpoint",
}
FORMS = ("hf", "torch", "torch_dist", "split", "lora")
RANK, ALPHA = 4, 8.0  # of the adapters that are trained
_SIZES = ("tp", "pp", "vpp", "ep", "etp", "dp")

# A Llama of 0.2 million parameters: grouped attention, gated MLP, untied embeddings; large enough for TP 4, PP 4 and to learn something.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the path between saving and loading: a form to go through, or "reshard" to another layout."""

    kind: str
    changes: LayoutChanges = field(default_factory=LayoutChanges)
    text: str = ""


def parse_stage(text: str) -> Stage:
    """A --via step: hf, torch, torch_dist, split, lora, or reshard:tp=2,pp=1. Errors: E510 for anything else."""
    kind, colon, rest = text.strip().partition(":")
    if kind in FORMS and not colon:
        return Stage(kind, text=kind)
    if kind != "reshard":
        near = nearest(kind, [*FORMS, "reshard"], 1)
        hint = f"did you mean {near[0]}?" if near else ""
        raise CkptError("E510", f"there is no way through {text!r}", expected=f"{', '.join(FORMS)}, reshard:tp=2,pp=1", hint=hint)
    sizes: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        name, _, number = part.partition("=")
        if name.strip() not in _SIZES or not number.strip().isdigit() or int(number) < 1:
            what = f"{', '.join(_SIZES)} and a number, as reshard:tp=2,pp=1"
            raise CkptError("E510", f"reshard does not understand {part!r}", expected=what)
        sizes[name.strip()] = int(number)
    if not sizes:
        raise CkptError("E510", "reshard to which layout?", expected="reshard:tp=2,pp=1", found=text)
    return Stage("reshard", LayoutChanges(**sizes), text)


@dataclass(frozen=True, slots=True)
class Settings:
    """The experiment.

    config       HF config of the model that is trained from random weights; not used with `run`.
    run, iteration, max_layers   the checkpoint to start from, which iteration, and how many of its layers (None: all).
    steps, save_at   steps of the straight run, and after how many of them the other one saves.
    layout       of the processes that train;   via: what happens to the checkpoint between saving and loading.
    optimizer    "distributed" or "plain" (None: as the checkpoint's, else distributed);   form: "torch_dist" or "torch" that is saved.
    dtype        of the parameters (None: as config or checkpoint say);   spec: "auto", "te" or "local".
    dropout      of attention and hidden states (None: 0.1 where the layout stays, 0 where it changes; a checkpoint's own with `run`).
    sequences, length   of a step's data;   seed;   rate: the peak learning rate;   inject: a mistake to make, or None.
    """

    config: dict[str, Any] = field(default_factory=lambda: dict(TINY))
    run: str | None = None
    iteration: str = "latest"
    max_layers: int | None = None
    family: str | None = None
    steps: int = 8
    save_at: int | None = None
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    via: tuple[Stage, ...] = ()
    optimizer: str | None = None
    form: str = "torch_dist"
    dtype: str | None = None
    spec: str = "auto"
    dropout: float | None = None
    sequences: int = 8
    length: int = 32
    seed: int = 1234
    rate: float = 5e-3
    inject: str | None = None

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise CkptError("E511", "the experiment needs at least 2 steps", found=str(self.steps))
        if not 1 <= self.saved_after < self.steps:
            raise CkptError(
                "E511",
                "a run can be saved after the first step and before the last",
                expected=f"1 to {self.steps - 1}",
                found=str(self.save_at),
            )
        if self.inject is not None and self.inject not in INJECTIONS:
            near = nearest(self.inject, INJECTIONS, 1)
            raise CkptError(
                "E512",
                f"there is no mistake {self.inject!r} to make",
                expected=", ".join(INJECTIONS),
                hint=f"did you mean {near[0]}?" if near else "",
            )
        for name, value, known in (
            ("--optimizer", self.optimizer, (None, "distributed", "plain")),
            ("--ckpt-format", self.form, ("torch_dist", "torch")),
            ("--spec", self.spec, ("auto", "te", "local")),
            ("--dtype", self.dtype, (None, "bfloat16", "float32")),
        ):
            if value not in known:
                raise CkptError("E511", f"{name} cannot be {value!r}", expected=", ".join(k for k in known if k))

        if self.lora and (len(self.via) > 1 or self.run or self.layout.tp > 1 or self.form != "torch_dist" or self.spec == "te"):
            raise CkptError(
                "E515",
                "an adapter is trained on a model of random weights, without tensor parallelism, and goes through a PEFT folder alone",
                expected="--via lora as the only stage; no RUN, no --tp, no --ckpt-format torch, no --spec te",
            )

    @property
    def lora(self) -> bool:
        """Whether an adapter is trained, the base being frozen."""
        return any(stage.kind == "lora" for stage in self.via)

    @property
    def saved_after(self) -> int:
        """After how many steps the interrupted run saves."""
        return self.steps // 2 if self.save_at is None else self.save_at
