"""The padding of the vocabulary: a matter of the parallel layout, not of the model."""

from __future__ import annotations

from dataclasses import replace

from .errors import CkptError
from .families.config import padded_vocab
from .model_names import EMBEDDING, HEAD, TABLES
from .notes import Note
from .options import ConvertOptions
from .views import View


def divisor(view: View, options: ConvertOptions) -> int:
    """make_vocab_size_divisible_by of the result: asked for, else the source's, else Megatron's default of 128."""
    return int(options.divisible_by or view.args.get("make_vocab_size_divisible_by") or 128)


def padded_rows(view: View, options: ConvertOptions) -> int:
    """Rows of the vocabulary tables of the result. E301 when the rows asked for are too few or do not fit tp."""
    vocab = int(view.args.get("vocab_size") or view.dims.padded_vocab)
    rows = options.padded_vocab or padded_vocab(vocab, divisor(view, options), options.layout.tp)
    if rows < vocab or rows % options.layout.tp:
        raise CkptError(
            "E301",
            "the padded vocabulary does not fit",
            expected=f"at least {vocab} rows, a multiple of tp {options.layout.tp}",
            found=str(rows),
        )
    return rows


def repad(view: View, rows: int) -> View:
    """The view with vocabulary tables of `rows` rows: true rows kept, zeros after them."""
    vocab = int(view.args.get("vocab_size") or view.dims.padded_vocab)
    tensors = dict(view.tensors)
    for name, tensor in view.tensors.items():
        if name.endswith(TABLES) and tensor.global_shape[0] != rows:  # the tables and their optimizer state
            tensors[name] = tensor.with_rows(vocab, rows)
    return replace(view, tensors=tensors, args={**view.args, "padded_vocab_size": rows})


def pad_notes(view: View) -> list[Note]:
    """The zero rows that were added."""
    vocab, rows = int(view.args.get("vocab_size") or 0), int(view.args["padded_vocab_size"])
    names = [n for n in view.tensors if n in (EMBEDDING, HEAD)]
    return [Note("padded", ", ".join(names), f"{rows - vocab} zero rows after {vocab}")] if rows > vocab else []


def cut_notes(view: View) -> list[Note]:
    """The padding rows that were cut off."""
    rows, vocab = view.dims.padded_vocab, view.dims.symbols["V"]
    if view.source.format == "hf" or rows <= vocab:
        return []
    return [Note("cut", "vocabulary", f"{rows - vocab} padding rows after {vocab} are not part of the model")]
