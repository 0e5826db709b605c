"""Room for many files at once: a checkpoint of a thousand ranks has more of them than a process may open by default."""

from __future__ import annotations

import resource

from .errors import CkptError

SPARE = 64  # what Python, the terminal and the threads keep open themselves


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
