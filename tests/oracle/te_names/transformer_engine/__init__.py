"""Names and shapes of Transformer Engine's parameters, and nothing else: enough for megatron-core's own TE layer specs to build on a CPU.

Transformer Engine cannot be imported without CUDA libraries. What is judged with this stand-in is megatron-core's module tree and its
sharded_state_dict; nothing here computes. Parameter names as in transformer_engine 2.x pytorch/module/{linear,layernorm_linear,grouped_linear,
rmsnorm,layernorm}.py and attention/dot_product_attention (softmax_offset).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar

import torch

__version__ = "2.10.0"


class Anything:
    """Whatever else megatron-core imports from the library by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> None: ...
    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    @classmethod
    def is_initialized(cls) -> bool:
        return False

    @classmethod
    def apply(cls, *args: Any) -> None: ...


class Module(torch.nn.Module):
    """A module with the extra state that every TE module has, empty here."""

    def set_tensor_parallel_group(self, group: Any) -> None: ...
    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...
    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...
    def parameter(self, name: str, *shape: int, dtype: Any = None) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(*shape, dtype=dtype or torch.float32)))


class Linear(Module):
    """weight (out, in) and bias (out)."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, tp_size: int = 1, parallel_mode: str | None = None,
        params_dtype: Any = None, **rest: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        self.parallel_mode = parallel_mode
        self.parameter("weight", out_features, in_features, dtype=params_dtype)
        self.bias = None
        if bias:
            del self.bias
            self.parameter("bias", out_features, dtype=params_dtype)


class LayerNormLinear(Linear):
    """A linear layer with the norm before it."""

    def __init__(
        self, in_features: int, out_features: int, normalization: str = "LayerNorm", params_dtype: Any = None, **rest: Any
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **rest)
        self.parameter("layer_norm_weight", in_features, dtype=params_dtype)
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            del self.layer_norm_bias
            self.parameter("layer_norm_bias", in_features, dtype=params_dtype)


class GroupedLinear(Module):
    """weight0 .. and bias0 .., one per local expert."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool = True, tp_size: int = 1, parallel_mode: str | None = None,
        params_dtype: Any = None, **rest: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fp8_meta, self.fp8, self.fp8_calibration = {"fp8_checkpoint": False}, False, False
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        for number in range(num_gemms):
            self.parameter(f"weight{number}", out_features, in_features, dtype=params_dtype)
        for number in range(num_gemms if bias else 0):
            self.parameter(f"bias{number}", out_features, dtype=params_dtype)


class RMSNorm(Module):
    """weight."""

    def __init__(self, hidden_size: int | None = None, eps: float = 1e-5, normalized_shape: int | None = None, **rest: Any) -> None:
        super().__init__()
        self.parameter("weight", hidden_size or normalized_shape or 0)


class LayerNorm(RMSNorm):
    """weight and bias."""

    def __init__(self, hidden_size: int | None = None, eps: float = 1e-5, normalized_shape: int | None = None, **rest: Any) -> None:
        super().__init__(hidden_size, eps, normalized_shape)
        self.parameter("bias", hidden_size or normalized_shape or 0)


class DotProductAttention(Module):
    """No parameter, or one sink per head."""

    def __init__(self, num_attention_heads: int, kv_channels: Any, tp_size: int = 1, softmax_type: str = "vanilla", **rest: Any) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self.parameter("softmax_offset", num_attention_heads // tp_size)


KNOWN: dict[str, Any] = {
    c.__name__: c for c in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)
} | {"get_cpu_offload_context": lambda *args, **kwargs: (contextlib.nullcontext(), lambda value: value)}
FOLDERS = ("pytorch", "ops", "module", "tensor", "common", "recipe", "distributed", "attention", "cpp_extensions")


class Package(types.ModuleType):
    """A module of the library in which every name exists."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in sys.modules or name in FOLDERS:
            return importlib.import_module(f"{self.__name__}.{name}")
        value = KNOWN.get(name) or type(name, (Anything,), {})
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below transformer_engine."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith("transformer_engine.") or name == "transformer_engine_torch":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.insert(0, Finder())
pytorch = importlib.import_module("transformer_engine.pytorch")
common = importlib.import_module("transformer_engine.common")
