"""The program of the processes: every job of a list, one after the other. Rank 0 tells on stdout how far it is, a JSON line a step."""

from __future__ import annotations

import sys
from pathlib import Path

from . import cpu_shim


def main() -> None:
    """Run the jobs of the file named on the command line."""
    cpu_shim.install()  # before the first import of megatron.core

    import torch.distributed as dist

    from ..job import read_jobs
    from .loop import train
    from .parallel import start_processes

    start_processes()
    for job in read_jobs(Path(sys.argv[1])):
        train(job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
