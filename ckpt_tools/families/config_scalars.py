"""The reversible transforms of one HF value into one Megatron value, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import CkptError
from .config_kinds import brief


@dataclass(frozen=True, slots=True)
class Scalar:
    """forward(HF value, operand) -> Megatron value; backward(Megatron value, operand) -> HF value. CkptError E305 when there is none."""

    forward: Callable[[Any, Any], Any]
    backward: Callable[[Any, Any], Any]


def _divided(value: Any, operand: Any) -> Any:
    if not operand or value % operand:
        raise CkptError(
            "E305", "a Megatron size is not a multiple of the HF size it is counted in", found=f"{brief(value)} and {brief(operand)}"
        )
    return value // operand


def _square_root(value: Any, operand: Any) -> Any:
    if value <= 0:
        raise CkptError("E311", "config.json: a scale must be positive", found=brief(value))
    return 1.0 / math.sqrt(value)


def _square(value: Any, operand: Any) -> Any:
    exact = 1.0 / (value * value)
    return round(exact) if math.isclose(exact, round(exact), rel_tol=1e-6) else exact


def _window(value: Any, operand: Any) -> Any:
    if value is None:
        return None
    if value < 1:
        raise CkptError("E311", "config.json: sliding_window must be at least 1", found=brief(value))
    return (value - 1, 0)


def _unwindow(value: Any, operand: Any) -> Any:
    if value is None:
        return None
    good = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if not good or value[0] < 0 or value[1] not in (0, -1):
        raise CkptError("E305", "an HF config cannot say this attention window", expected="window_size (n, 0)", found=brief(value))
    return value[0] + 1


KINDS: dict[str, Scalar] = {
    "copy": Scalar(lambda v, o: v, lambda v, o: v),
    "not": Scalar(lambda v, o: not v, lambda v, o: not v),
    # v * another HF field: deepseek counts shared experts, Megatron gives their total width
    "times": Scalar(lambda v, o: v * o, _divided),
    # 1 / sqrt(v): gemma's query_pre_attn_scalar is Megatron's softmax_scale
    "rsqrt": Scalar(_square_root, _square),
    # HF counts the query itself among the keys it sees, Megatron counts the keys to its left (logits measured equal)
    "window": Scalar(_window, _unwindow),
}
