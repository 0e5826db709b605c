"""Writes pickles (protocol 2) that Python, torch and megatron-core load to the objects ckpt's inert values stand for."""

from __future__ import annotations

from .dcp_metadata import Metadata
from .dcp_metadata_writer import dump_metadata
from .pickle_emitter import Emitter
from .pickle_values import TensorRef, TensorSpec


def dump(value: object, tensors: list[TensorSpec | TensorRef] | None = None) -> bytes:
    """The pickle of any value that `pickles.load` returns, or that is built from its classes; a Metadata becomes a `.metadata`.

    Tensors are written as torch storages "0", "1", ... and appended to `tensors` in that order; without a list they are an error.
    E490 for values of unknown classes and for nesting deeper than 150.
    """
    if type(value) is Metadata:
        return dump_metadata(value)
    writer = Emitter(tensors)
    writer.value(value, 0)
    return b"\x80\x02" + bytes(writer.out) + b"."
