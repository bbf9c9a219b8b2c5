"""Where random tests begin: somewhere else in every run, and there again on request."""

from __future__ import annotations

import os
import random


def new_seed() -> int:
    """What `TESTS_SEED` says, or drawn; printed, so that it is shown where its test fails."""
    seed = int(os.environ.get("TESTS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"TESTS_SEED={seed}")
    return seed
