"""Lets megatron-core 0.16.1 and 0.19.2 build, save, load and train a GPTModel on a machine without CUDA.

    from ckpt_tools.resume.trainer import cpu_shim
    cpu_shim.install()                 # before the first import of megatron; returns the names of the patches it applied
    from megatron.core... import ...

Where CUDA is present nothing is touched and the answer is an empty tuple. Each patch below says in its docstring which
obstacle it removes; nothing is patched "to be safe". Megatron-LM's pretrain script and argument parser are not needed.

Not covered: grouped experts (GroupedMLP of 0.16 wants a CUDA extension), context parallel, Transformer Engine (its Python package cannot
be imported without the CUDA libraries, and an imitation of its modules would judge only itself), asynchronous saving, RNG states of a real
GPU (here they are the CPU generator's).
Written against megatron-core 0.16.1 and 0.19.2 with torch 2.13 on CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

_installed: tuple[str, ...] | None = None


def install() -> tuple[str, ...]:
    """Apply every patch once, in this process, and return their names; () where CUDA is available. Imports torch and megatron.core."""
    global _installed
    if _installed is not None:
        return _installed
    import torch

    if torch.cuda.is_available() and os.environ.get("CKPT_TRAIN_DEVICE") != "cpu":
        _installed = ()
        return _installed
    if any(name.startswith("megatron.core.") for name in sys.modules):
        raise RuntimeError("cpu_shim.install() must run before megatron.core is imported: some patches replace names it binds at import")
    for patch in _BEFORE_MEGATRON:
        patch()
    for patch in _AFTER_MEGATRON:
        patch()
    _installed = tuple(patch.__name__ for patch in (*_BEFORE_MEGATRON, *_AFTER_MEGATRON))
    return _installed


def no_compilation() -> None:
    """`jit_fuser` is torch.compile: where a fusion is on (Megatron-LM turns `bias_dropout_fusion` on) it starts a C++ compiler."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def override_decorator() -> None:
    """megatron.training of 0.19.2 imports `typing.override`, which Python has from 3.12."""
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]


def modules_that_need_triton() -> None:
    """Two modules import triton unguarded although a dense model never calls them.

    0.19.2: transformer/moe/ops/paged_stash.py (from every GPTModel); both: custom_layers/batch_invariant_kernels.py (from
    megatron.training). A stand-in for triton itself would be found by torch.compile, so only these two modules are replaced.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    stash = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    stash.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
    stash.paged_stash_copy_kernel = stash.paged_stash_pop_kernel = None  # type: ignore[attr-defined]
    invariant = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    for name in ("enable_batch_invariant_mode", "disable_batch_invariant_mode", "set_batch_invariant_mode"):
        setattr(invariant, name, lambda *args, **kwargs: contextlib.nullcontext())
    invariant.is_batch_invariant_mode_enabled = lambda: False  # type: ignore[attr-defined]
    for module in (stash, invariant):
        sys.modules.setdefault(module.__name__, module)


def current_device() -> None:
    """`device=torch.cuda.current_device()` in rotary embedding, tensor-parallel mappings, gradient buffers and p2p: answer the CPU."""
    import torch

    torch.cuda.current_device = lambda: torch.device("cpu")


def synchronize() -> None:
    """dist_checkpointing's writer, fully parallel saving, pipeline p2p and timers wait for the device: CPU work is already done."""
    import torch

    torch.cuda.synchronize = lambda device=None: None


def tensors_stay() -> None:
    """`.cuda()` on parameters, gradients and loss scales (embedding setup of pipelines, optimizer load): the tensor stays where it is."""
    import torch

    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def factories_on_the_device() -> None:
    """`torch.tensor(..., device='cuda')` and its kind in schedules, gradient clipping and optimizers: make them on the CPU."""
    import torch

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def call(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = torch.device("cpu")
            return factory(*args, **kwargs)

        return call

    for name in ("tensor", "zeros", "ones", "empty", "full", "zeros_like", "empty_like", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def type_names() -> None:
    """Megatron's optimizers sort parameters by `param.type() == 'torch.cuda.FloatTensor'`: answer the CUDA name of the dtype."""
    import torch

    real = torch.Tensor.type

    def type_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = real(self, *args, **kwargs)
        if args or kwargs or not isinstance(answer, str):
            return answer
        return answer.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name


def streams() -> None:
    """Gradient buckets order their communication on CUDA streams: on CPU everything is already in order."""
    import torch

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def record(self, stream: Any = None) -> None: ...
        def synchronize(self) -> None: ...
        def wait(self, stream: Any = None) -> None: ...

    class Stream:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def wait_stream(self, other: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def synchronize(self) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return Event()

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        yield

    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: Stream()
    torch.cuda.stream = on_stream


def one_generator() -> None:
    """The tracker of tensor-parallel RNG states works on the CUDA generator: give it the CPU one.

    Without this even a forward with dropout 0 fails, because attention forks the tracker ("cuda rng state ... is not added").
    After the process groups exist call `tensor_parallel.model_parallel_cuda_manual_seed(seed)` as on a GPU.
    """
    import torch

    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)


def one_generator_in_megatron() -> None:
    """megatron.core.tensor_parallel.random has its own pair of functions that talk to the CUDA generator's C++ interface."""
    import torch
    from megatron.core.tensor_parallel import random

    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # it warns each time that the CPU's generator moved inside a fork
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def split_sizes_as_numbers() -> None:
    """The token dispatcher hands all_to_all the split sizes as tensors, which Megatron turns into numbers only when they are on a GPU."""
    import torch.distributed as dist

    real = dist.all_to_all_single

    def all_to_all_single(output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **more: Any) -> Any:
        sizes = [None if s is None else [int(x) for x in s] for s in (output_split_sizes, input_split_sizes)]
        return real(output, input, *sizes, **more)

    dist.all_to_all_single = all_to_all_single


def router_without_transformer_engine() -> None:
    """0.16.1 without Transformer Engine: NameError te_general_gemm in every router."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def latent_attention_without_transformer_engine() -> None:
    """Latent attention asks isinstance(x, a class of Transformer Engine), which is None without it."""
    import megatron.core.transformer.multi_latent_attention as latent

    if importlib.util.find_spec("transformer_engine") is None:
        latent.HAVE_TE = False


def masks_on_the_cpu() -> None:
    """The local spec's attention makes its causal and sliding-window masks on the GPU."""
    import megatron.core.fusions.fused_softmax as softmax
    import torch

    def window(length: int, keys: int, size: tuple[int, int]) -> Any:
        ones = torch.ones(length, keys, dtype=torch.bool)
        return ~torch.tril(torch.triu(ones, keys - length - size[0]), keys - length + size[1])

    softmax.get_default_causal_mask = lambda length, *rest: torch.ones(length, length).triu(1).bool()
    if hasattr(softmax, "get_sliding_window_causal_mask"):
        softmax.get_sliding_window_causal_mask = window


def latent_local_attention() -> None:
    """The local spec cannot build latent attention (0.16.1, 0.19.2: DotProductAttention takes no k_channels): leave these words out and
    let values be narrower than keys."""
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    real_init, real_forward = DotProductAttention.__init__, DotProductAttention.forward

    def init(self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        real_init(self, *args, **kwargs)
        self.latent = k_channels is not None

    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self.latent:
            return real_forward(self, query, key, value, attention_mask, *args, **kwargs)
        length, batch = query.shape[:2]
        scores = torch.einsum("sbnd,tbnd->bnst", query.float(), key.float()) * self.softmax_scale
        weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1)
        return torch.einsum("bnst,tbnd->sbnd", weights.to(value.dtype), value).reshape(length, batch, -1)

    DotProductAttention.__init__, DotProductAttention.forward = init, forward


def steps_of_torch_adam() -> None:
    """0.16.1 cannot load the distributed optimizer over torch's Adam (KeyError "step"): the count per parameter, which torch keeps and the
    fused Adam of a GPU run does not, is looked for among the tensors. It is already there, from the parameter groups: leave it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    real = DistributedOptimizer._set_main_param_and_optimizer_states

    def keep_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        real(self, model_param, {**{k: v.clone() for k, v in state.items() if k == "step"}, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = keep_step


_BEFORE_MEGATRON = (
    no_compilation,
    override_decorator,
    modules_that_need_triton,
    current_device,
    synchronize,
    tensors_stay,
    factories_on_the_device,
    type_names,
    streams,
    one_generator,
    split_sizes_as_numbers,
)
_AFTER_MEGATRON = (
    one_generator_in_megatron,
    router_without_transformer_engine,
    latent_attention_without_transformer_engine,
    masks_on_the_cpu,
    latent_local_attention,
    steps_of_torch_adam,
)
