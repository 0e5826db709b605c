"""`python -m ckpt_tools` is the same as `ckpt`."""

from __future__ import annotations

import sys

from .commands.main import main

if __name__ == "__main__":
    sys.exit(main())
