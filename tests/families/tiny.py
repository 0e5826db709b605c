"""Tiny models of every family with random weights: fixtures/families/<variant>.json is the config.json of one, transformers makes the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from families.remote_code import REMOTE, as_llama

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "families"
VARIANTS = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def config_of(variant: str) -> dict[str, Any]:
    """The config.json of a variant."""
    value: dict[str, Any] = json.loads((FOLDER / f"{variant}.json").read_text())
    return value


def build(variant: str, dtype: str = "float32", **changes: Any) -> Any:
    """The transformers model of a variant, norms and biases random too, so that a mix-up shows. Deterministic. changes: other fields."""
    import torch
    import transformers

    fields = {**config_of(variant), **changes}
    torch.manual_seed(sum(map(ord, variant)))
    remote = fields["model_type"] in REMOTE
    config = transformers.LlamaConfig(**as_llama(fields)) if remote else transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    zero_centred = "gemma" in fields["model_type"] or fields["model_type"] in ("nemotron", "qwen3_next")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")):
                parameter.copy_((0.0 if zero_centred or name.endswith("bias") else 1.0) + 0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return model.to(getattr(torch, dtype)).eval()


def write(variant: str, folder: Path, dtype: str = "float32", **options: Any) -> Any:
    """Save the model of a variant with save_pretrained(**options); returns it."""
    model, config = build(variant, dtype), config_of(variant)
    if config["model_type"] not in REMOTE:
        model.save_pretrained(folder, **options)
        return model
    from safetensors.torch import save_file

    tensors = REMOTE[config["model_type"]][0](model.state_dict(), config)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}, indent=2))
    return model


def load(folder: Path, variant: str) -> Any:
    """The model that transformers makes of an HF folder, in float32; every tensor must be wanted and there."""
    import torch
    import transformers
    from safetensors.torch import load_file

    config = config_of(variant)
    if config["model_type"] in REMOTE:
        written = json.loads((folder / "config.json").read_text())
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**as_llama(written), attn_implementation="eager"))
        model.load_state_dict(REMOTE[config["model_type"]][1](load_file(folder / "model.safetensors"), written), strict=True)
        return model.eval()
    token = (
        {"pad_token_id": config["pad_token_id"]} if config.get("pad_token_id") is not None else {}
    )  # some classes' default is beyond 509
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True, **token
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"], loading
    return model
