"""ckpt: move LLM checkpoints between Hugging Face and Megatron-Core, between parallel layouts, between save and resume.

from ckpt_tools import open_checkpoint, as_hf
checkpoint = open_checkpoint("runs/llama")          # headers only
weights = as_hf(checkpoint)                         # HF names, nothing converted yet
weights["model.norm.weight"][:4]                    # reads four numbers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, open_checkpoint
    from .conversion import plan, plan_conversion, run_conversion
    from .errors import CkptError
    from .execution import Result, execute
    from .layout import ParallelLayout
    from .lazy import LazyTensor
    from .options import ConvertOptions
    from .planning import Plan
    from .tensors import Chunk, Extent, TensorMetadata
    from .views import View, as_hf, as_mcore

__version__ = "0.1.0"

_PLACES = {
    "Checkpoint": "checkpoint",
    "open_checkpoint": "checkpoint",
    "ConvertOptions": "options",
    "plan_conversion": "conversion",
    "run_conversion": "conversion",
    "plan": "conversion",
    "CkptError": "errors",
    "Result": "execution",
    "execute": "execution",
    "ParallelLayout": "layout",
    "LazyTensor": "lazy",
    "Plan": "planning",
    "Chunk": "tensors",
    "Extent": "tensors",
    "TensorMetadata": "tensors",
    "View": "views",
    "as_hf": "views",
    "as_mcore": "views",
}

__all__ = [
    "Checkpoint",
    "Chunk",
    "CkptError",
    "ConvertOptions",
    "Extent",
    "LazyTensor",
    "ParallelLayout",
    "Plan",
    "Result",
    "TensorMetadata",
    "View",
    "as_hf",
    "as_mcore",
    "execute",
    "open_checkpoint",
    "plan",
    "plan_conversion",
    "run_conversion",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use: `import ckpt_tools` itself costs nothing."""
    from importlib import import_module

    if name in _PLACES:
        return getattr(import_module(f".{_PLACES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
