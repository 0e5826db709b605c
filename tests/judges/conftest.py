"""The tiny models are made once for all judges."""

from judges.shared_cases import models  # noqa: F401
