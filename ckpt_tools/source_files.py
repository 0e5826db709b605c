"""The one way in which files of a checkpoint are opened: regular files only, since a pipe or device in their place would hang or never
end; and room for many at once, since a checkpoint of a thousand ranks has more of them than a process may open by default."""

from __future__ import annotations

import os
import resource
import stat
from typing import BinaryIO

from .errors import CkptError

SPARE = 64  # what Python, the terminal and the threads keep open themselves


def open_source(path: str) -> int:
    """File descriptor for reading. CkptError E901 when it is no regular file (links are followed) or the system refuses it."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CkptError("E901", "not a regular file", where=path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CkptError("E901", "cannot read the file", where=path, found=error.strerror or str(error)) from None
    except ValueError as error:  # a NUL in the name
        raise CkptError("E901", "cannot read the file", where=path, found=str(error)) from None


def opened(path: str) -> BinaryIO:
    """The file as an object to read bytes from. Errors as open_source."""
    return os.fdopen(open_source(path), "rb")


def allow(count: int) -> None:
    """Let this process hold `count` files open beside its own. CkptError E901 when the system's limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise CkptError(
            "E901", "this process may not open that many files", expected=f"{wanted}", found=f"{hard}", hint=f"ulimit -Hn {wanted}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
