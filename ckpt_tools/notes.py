"""What a person must be told about a conversion: nothing is dropped, cast, padded, cut, guessed or ignored without a note."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """kind: "assumed", "dropped", "cast", "padded", "cut", "kept", "carried", "config", "flags", "warning"; subject: tensor or file names,
    or "";
    text: one sentence."""

    kind: str
    subject: str
    text: str
