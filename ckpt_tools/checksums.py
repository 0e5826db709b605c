"""The checksums that torch.save stores and no stock reader looks at: one flipped bit is otherwise returned as data."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .checkpoint import Checkpoint
from .errors import CkptError
from .formats.torch_dist import TorchDist
from .formats.torch_legacy import Legacy
from .formats.torch_zip import TorchFile, open_torch_file
from .notes import Note


def check_checksums(checkpoint: Checkpoint) -> Note:
    """Read every stored record and compare its CRC-32; the note says how many were checked, and how many have none.

    Errors: E415 naming the file, the tensor and both values.
    """
    checked = without = 0
    for wrong in _checked(checkpoint):
        if wrong is None:
            without += 1
            continue
        checked += 1
        if isinstance(wrong, CkptError):
            raise wrong
    if not checked and not without:
        return Note("warning", "", "safetensors files hold no checksums: nothing was checked")
    return Note("kept", "", f"{checked} stored checksums are right" + (f", {without} records have none" if without else ""))


def crc_problems(checkpoint: Checkpoint) -> Iterator[CkptError]:
    """An E415 for every record whose CRC-32 is not that of its bytes."""
    yield from (wrong for wrong in _checked(checkpoint) if isinstance(wrong, CkptError))


def _checked(checkpoint: Checkpoint) -> Iterator[CkptError | bool | None]:
    """For each record: None when no checksum is stored, True when it is right, otherwise an E415."""
    for name, file in torch_files(checkpoint):
        for result in file.check_crc():
            if result.expected is None or (not result.expected and result.size):
                yield None
            elif result.ok:
                yield True
            else:
                yield CkptError(
                    "E415",
                    "bytes are not those that were written",
                    where=f"{file.path}: {name}, record {result.record}",
                    expected=f"CRC-32 {result.expected:#010x}",
                    found=f"{result.found:#010x}",
                    hint="the file was damaged after it was written; copy it again or take another iteration",
                )


def torch_files(checkpoint: Checkpoint) -> Iterator[tuple[str, TorchFile]]:
    """(tensor, object or rank folder, opened file) of every torch.save file and record of a checkpoint."""
    details = checkpoint.details
    if isinstance(details, Legacy):
        for path in details.files:
            folder = os.path.dirname(path)
            yield os.path.basename(folder), open_torch_file(path)
            for name in ("distrib_optim.pt", "optim.pt"):
                if os.path.isfile(os.path.join(folder, name)):
                    yield os.path.basename(folder), open_torch_file(os.path.join(folder, name))
    elif isinstance(details, TorchDist):
        common = os.path.join(details.directory, "common.pt")
        if os.path.exists(common):
            yield "common.pt", open_torch_file(common)
        entries = [(t.fqn, c.extent) for t in details.tensors.values() for c in t.chunks] + [
            (o.fqn, o.extent) for o in details.objects.values()
        ]
        for fqn, extent in entries:
            if extent is not None:
                yield fqn, open_torch_file(extent.path, extent.offset, extent.length)
